"""Models that Transformers computes outlive their workers as Quire's own do: the same texts and log-probabilities."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import QuireProcess
from tests.faults.calls import assert_same, owned
from tests.faults.stack import FaultStack, Stream, said
from tests.worker.transformers_checkpoints import make_kind

FLAGS = ("--lease-s", "1", "--beat-s", "0.25")
TOKENS = 200
STREAMS = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1, "seed": 5, "n": 2, "logprobs": 1, "presence_penalty": 0.6},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0, "stop": ["never said by anyone"]},
)


def call(number: int) -> dict[str, Any]:
    prompt = f"{number}. Once upon a time"
    return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "min_tokens": TOKENS, **KINDS[number % len(KINDS)]}


class Crew:
    def __init__(self, stack: FaultStack) -> None:
        self.stack = stack
        _, self.url = stack.gateway("--write-timeout-s", "60")
        self.workers: dict[str, QuireProcess] = {}
        self.man()
        answers = [Stream(self.url, call(number)) for number in range(STREAMS)]
        self.expected = [[said([choice]) for choice in one.wait_end(60).answer["choices"]] for one in answers]

    def man(self) -> None:
        """Start the workers that do not run."""
        for name in "ab":
            if name not in self.workers or self.workers[name].process.poll() is not None:
                self.workers[name] = self.stack.worker(name, *FLAGS, ready=False)
        for worker in self.workers.values():
            worker.wait_for("ready: worker", 100)


@pytest.fixture(scope="module", params=["phi3", "gemma3"])
def crew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("model")
    longer = {"max_position_embeddings": 512} | (
        {"original_max_position_embeddings": 512} if request.param == "phi3" else {}
    )
    stack = FaultStack(tmp_path_factory.mktemp("other"), make_kind(folder / "tiny", request.param, **longer))
    try:
        yield Crew(stack)
    finally:
        stack.close()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_streams_go_on_where_their_worker_ends(crew: Crew, ending: signal.Signals) -> None:
    crew.man()
    streams = {str(number): Stream(crew.url, call(number) | {"stream": True}) for number in range(STREAMS)}
    for stream in streams.values():
        stream.wait_events(5, 60)
    worker = crew.workers[max(crew.workers, key=lambda name: len(owned(crew.stack, name)))]
    os.kill(worker.pid, ending)
    worker.wait()
    assert_same(streams, {name: crew.expected[int(name)] for name in streams})
    crew.stack.assert_invariants()
