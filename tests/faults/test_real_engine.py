"""Cases 1 to 7 with the real engine and the demo model: 32 streams of every kind at once.

The only injected fault: a prompt with one particular token kills or hangs the worker.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.conftest import QuireProcess
from tests.support.faults.calls import assert_same, longest_pause, owned
from tests.support.faults.stack import FaultStack, Stream, said

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

LEASE_S = 1.0
FLAGS = ("--lease-s", str(LEASE_S), "--beat-s", "0.25", "--watchdog-s", "3", "--drain-s", "0.2")
# Two bytes of letters outside ASCII. No prompt here contains them, and the demo model draws them less than once in a
# million tokens at temperature 1. (It does draw the tokens of conversation roles.)
DEADLY, HANGING = 154, 155
STREAMS = 32
# Lengths of an answer that a fault interrupts, and of an answer that ends soon.
LONG, SHORT = 300, 40
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 6, "frequency_penalty": 0.5},
    {"temperature": 1, "seed": 7, "n": 2, "logprobs": 2, "presence_penalty": 0.6, "repetition_penalty": 1.1},
    {"temperature": 0.7, "seed": 8, "stop": ["\n\n\n", "never said by anyone"]},
)
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SUBJECTS = ("the sea", "a clock", "bread", "winter", "a small town", "numbers", "an old map", "birds")


def call(number: int, tokens: int = LONG) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"{number}. A story about {SUBJECTS[number % len(SUBJECTS)]}:",
        "max_tokens": tokens,
        # Excludes end tokens: they have no visible text, so a stream of them would seem to stand still.
        "min_tokens": tokens,
        **KINDS[number % len(KINDS)],
    }


class Demo:
    """One gateway, workers `a` and `b` on demand, and the answer of every call without faults."""

    def __init__(self, stack: FaultStack) -> None:
        self.stack = stack
        self.workers: dict[str, QuireProcess] = {}
        _, self.url = stack.gateway("--write-timeout-s", "60")
        self.crew("a")
        self.expected = {tokens: self.undisturbed(tokens) for tokens in (LONG, SHORT)}

    def undisturbed(self, tokens: int) -> list[list[str]]:
        """Return the choices of every call without faults."""
        answers = [Stream(self.url, call(number, tokens)) for number in range(STREAMS)]
        return [[said([choice]) for choice in stream.wait_end(100).answer["choices"]] for stream in answers]

    def start(self, name: str) -> None:
        faults = {"TEST_STEP_S": "0", "TEST_DEADLY_TOKEN": str(DEADLY), "TEST_HANGING_TOKEN": str(HANGING)}
        self.workers[name] = self.stack.worker(name, *FLAGS, ready=False, **faults)

    def crew(self, *names: str) -> None:
        """Make exactly these workers run."""
        for name, process in list(self.workers.items()):
            if name not in names or process.process.poll() is not None:
                process.close()
                del self.workers[name]
        for name in names:
            if name not in self.workers:
                self.start(name)
        for process in self.workers.values():
            process.wait_for("ready: worker", 100)

    def streams(self, count: int = STREAMS, events: int = 5, tokens: int = LONG) -> dict[str, Stream]:
        """Start `count` streams and wait until all are in the middle of their answers."""
        found = {str(number): Stream(self.url, call(number % STREAMS, tokens) | STREAMED) for number in range(count)}
        for stream in found.values():
            stream.wait_events(events, 60)
        return found

    def owner(self) -> str:
        return max(self.workers, key=lambda name: len(owned(self.stack, name)))

    def assert_same(self, streams: dict[str, Stream], tokens: int = LONG) -> None:
        assert_same(streams, {name: self.expected[tokens][int(name) % STREAMS] for name in streams})


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    stack = FaultStack(tmp_path_factory.mktemp("demo"), PROJECT_ROOT / DEFAULT_MODEL)
    try:
        yield Demo(stack)
    finally:
        stack.close()


def kill(process: QuireProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.alone
def test_a_killed_workers_32_streams_go_on_elsewhere(demo: Demo) -> None:
    demo.crew("a", "b")
    streams = demo.streams()
    name = demo.owner()
    assert owned(demo.stack, name)
    kill(demo.workers[name])
    demo.assert_same(streams)
    # The lease, plus the time to notice its end and to recompute the lost tokens.
    assert longest_pause(streams) < LEASE_S + 2.0
    demo.stack.assert_invariants()


@pytest.mark.promise
def test_without_a_worker_streams_wait_and_go_on_with_its_next_process(demo: Demo) -> None:
    demo.crew("a")
    streams = demo.streams(8)
    kill(demo.workers["a"])
    late = Stream(demo.url, call(0) | {"timeout": 1}).wait_end()
    assert late.status == 504
    assert not any(stream.failure or stream.error for stream in streams.values())
    demo.crew("a")
    demo.assert_same(streams)
    demo.stack.assert_invariants()


@pytest.mark.promise
def test_a_worker_that_sleeps_is_fenced_when_it_wakes(demo: Demo) -> None:
    demo.crew("a", "b")
    streams = demo.streams()
    name = demo.owner()
    sleeper = demo.workers[name]
    sleeper.send(signal.SIGSTOP)
    try:
        demo.stack.wait(lambda: not owned(demo.stack, name), 20)
        demo.assert_same(streams)
    finally:
        sleeper.send(signal.SIGCONT)
    sleeper.wait_for("is lost: it ended or is parked, or another worker has claimed it")
    demo.stack.assert_invariants()


def test_an_engine_that_hangs_loses_its_streams_and_its_process_ends(demo: Demo) -> None:
    demo.crew("a")
    streams = demo.streams(8)
    hanging = Stream(demo.url, call(0) | {"prompt": [HANGING, 1], "max_tokens": 3, "min_tokens": 0, "n": 1})
    first = demo.workers["a"]
    assert first.wait(60) == 70
    # The request hangs each worker that takes it over; the third death is the last.
    for _ in range(4):
        if hanging.status:
            break
        demo.crew("a")
        demo.stack.wait(lambda: hanging.status or demo.workers["a"].process.poll() is not None, 60)
    assert hanging.wait_end().status == 500
    assert hanging.answer["error"]["code"] == "quarantined"
    demo.crew("a")
    demo.assert_same(streams)
    demo.stack.assert_invariants()


@pytest.mark.alone
@pytest.mark.promise
def test_a_worker_that_is_told_to_stop_hands_over_at_once(demo: Demo) -> None:
    demo.crew("a", "b")
    streams = demo.streams()
    leaving = demo.workers[demo.owner()]
    leaving.send(signal.SIGTERM)
    assert leaving.wait(30) == 0
    demo.assert_same(streams)
    redis = demo.stack.redis
    ids = [stream.response_headers["x-request-id"] for stream in streams.values()]
    assert {redis.hget(demo.stack.keys.request(request_id), "deaths") for request_id in ids} == {None}
    demo.stack.assert_invariants()


@pytest.mark.promise
def test_workers_that_are_restarted_one_by_one_fail_nothing(demo: Demo) -> None:
    demo.crew("a", "b")
    waves = []
    for name in ("a", "b"):
        waves.append(demo.streams(16))
        demo.workers[name].send(signal.SIGTERM)
        assert demo.workers[name].wait(30) == 0
        waves.append(demo.streams(16, 0))
        demo.crew("a", "b")
    for wave in waves:
        demo.assert_same(wave)
    demo.stack.assert_invariants()


@pytest.mark.promise
def test_a_prompt_that_kills_is_given_up_and_a_hundred_good_ones_finish(demo: Demo) -> None:
    demo.crew("a", "b")
    before = demo.stack.totals().get("quarantined", 0)
    good = demo.streams(100, 0, SHORT)
    deadly = Stream(demo.url, call(0) | {"prompt": [DEADLY, 1], "max_tokens": 3, "min_tokens": 0, "n": 1})
    deaths = 0
    while not deadly.status:
        ended = [name for name, process in demo.workers.items() if process.process.poll() is not None]
        for name in ended:
            assert demo.workers[name].wait() == -signal.SIGKILL
            deaths += 1
            demo.start(name)
        demo.stack.wait(
            lambda: deadly.status or any(process.process.poll() is not None for process in demo.workers.values()), 120
        )
    assert deadly.wait_end().answer["error"]["code"] == "quarantined"
    assert demo.stack.totals()["quarantined"] == before + 1
    demo.assert_same(good, SHORT)
    demo.crew("a", "b")
    demo.stack.assert_invariants()
    assert deaths <= 3
