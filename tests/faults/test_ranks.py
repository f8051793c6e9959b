"""Workers of several processes (ranks): all ranks of a worker die together, and its requests continue elsewhere."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.worker.models.files.loader import WEIGHTS
from tests.conftest import QuireProcess
from tests.support.faults.calls import assert_same, owned
from tests.support.faults.stack import FaultStack, Stream, said

LEASE_S = 1.0
FLAGS = ("--tensor-parallel-size", "2", "--lease-s", str(LEASE_S), "--beat-s", "0.25", "--watchdog-s", "3")
TOKENS = 120
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 5, "n": 2, "logprobs": 2, "presence_penalty": 0.6},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5},
)


def call(number: int) -> dict[str, Any]:
    prompt = f"{number}. Once upon a time"
    return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "min_tokens": TOKENS, **KINDS[number % len(KINDS)]}


def followers_of(process: QuireProcess) -> list[int]:
    """Return the process ids of a worker's follower ranks."""
    tasks = Path(f"/proc/{process.pid}/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_gone(pid: int, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


class Crew:
    """Workers `a` and `b` of two ranks each, a gateway, and the answer of every call without faults."""

    def __init__(self, stack: FaultStack, *flags: str) -> None:
        self.stack, self.flags = stack, (*FLAGS, *flags)
        _, self.url = stack.gateway("--write-timeout-s", "60")
        self.workers: dict[str, QuireProcess] = {}
        self.man()
        answers = [Stream(self.url, call(number)) for number in range(6)]
        self.expected = [[said([choice]) for choice in one.wait_end(60).answer["choices"]] for one in answers]

    def man(self) -> None:
        """Start the workers that are not running."""
        self.stack.man(self.workers, *self.flags)

    def streams(self) -> dict[str, Stream]:
        found = {str(number): Stream(self.url, call(number) | {"stream": True}) for number in range(6)}
        for stream in found.values():
            stream.wait_events(5, 60)
        return found

    def owner(self) -> QuireProcess:
        return self.workers[max(self.workers, key=lambda name: len(owned(self.stack, name)))]

    def assert_same(self, streams: dict[str, Stream]) -> None:
        assert_same(streams, {name: self.expected[int(name)] for name in streams})
        self.stack.assert_invariants()


@pytest.fixture(scope="module", params=["quire", "transformers"])
def whole_crew(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, long_model: Path
) -> Iterator[Crew]:
    stack = FaultStack(tmp_path_factory.mktemp("ranks"), long_model)
    try:
        yield Crew(stack, "--model-impl", request.param)
    finally:
        stack.close()


@pytest.fixture
def crew(whole_crew: Crew) -> Crew:
    whole_crew.man()
    return whole_crew


@pytest.mark.faults
def test_a_rank_that_is_killed_ends_its_worker_and_another_goes_on(crew: Crew) -> None:
    streams, worker = crew.streams(), crew.owner()
    (follower,) = followers_of(worker)
    os.kill(follower, signal.SIGKILL)
    assert worker.wait() != 0
    assert "rank 1 has ended (killed by SIGKILL)" in worker.stderr
    crew.assert_same(streams)


@pytest.mark.faults
def test_the_other_ranks_of_a_worker_that_is_killed_are_gone(crew: Crew) -> None:
    streams, worker = crew.streams(), crew.owner()
    (follower,) = followers_of(worker)
    os.kill(worker.pid, signal.SIGKILL)
    wait_gone(follower)
    crew.assert_same(streams)


@pytest.mark.faults
def test_a_rank_that_stands_still_costs_its_worker_the_requests(crew: Crew) -> None:
    streams, worker = crew.streams(), crew.owner()
    (follower,) = followers_of(worker)
    os.kill(follower, signal.SIGSTOP)
    crew.assert_same(streams)
    assert worker.wait(30) == 70  # the watchdog's
    wait_gone(follower)


@pytest.mark.faults
def test_a_rank_that_slept_for_a_while_wakes_to_a_worker_that_is_fenced(crew: Crew) -> None:
    streams, worker = crew.streams(), crew.owner()
    (follower,) = followers_of(worker)
    os.kill(follower, signal.SIGSTOP)
    time.sleep(2 * LEASE_S)  # there is no event to wait for
    os.kill(follower, signal.SIGCONT)
    crew.assert_same(streams)
    crew.assert_same(crew.streams())
    assert worker.process.poll() is None


@pytest.mark.faults
def test_a_worker_that_is_told_to_stop_ends_all_its_ranks_and_hands_over(crew: Crew) -> None:
    streams, worker = crew.streams(), crew.owner()
    (follower,) = followers_of(worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert not is_running(follower)
    assert "Traceback" not in worker.stderr
    crew.assert_same(streams)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-parallel-size", "3"), "3 ranks cannot share 4 heads, 2 key-value heads, .*; 1, 2, 4 can"),
        (("--tensor-parallel-size", "3", "--model-impl", "transformers"), "3 ranks cannot share 4 heads; 1, 2, 4 can"),
        (("--tensor-parallel-size", "2", "--kv-cache-gb", "500"), "--kv-cache-gb 500: that takes 500.00 GiB"),
    ],
)
def test_what_ranks_cannot_do_ends_the_start_with_the_reason(stack: FaultStack, flags: tuple, message: str) -> None:
    worker = stack.worker("a", *flags, ready=False)
    worker.wait_for(f"quire worker: .*{message}", 60)
    assert worker.wait() == 1


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_why_another_rank_cannot_load_is_the_last_thing_that_is_said(
    stack: FaultStack, tmp_path: Path, kernels: str
) -> None:
    stack.model = shutil.copytree(stack.model, tmp_path / "damaged")
    tensors = load_file(stack.model / WEIGHTS)
    tensors["model.layers.2.mlp.down_proj.weight"][0, -1] = math.nan  # the other rank's share
    save_file(tensors, stack.model / WEIGHTS, metadata={"format": "pt"})
    worker = stack.worker("a", "--tensor-parallel-size", "2", "--kernels", kernels, ready=False)
    assert worker.wait(60) == 1
    said = worker.stderr.splitlines()[-1]
    assert said.startswith("quire worker: rank 1: ")
    assert "down_proj.weight has values that are not finite" in said
