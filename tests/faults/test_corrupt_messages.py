"""Corrupt data in Redis is dropped or ends the one request it belongs to; all other requests continue."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.shared.protocol.broker import Admission, Broker, QueueBounds, new_id
from quire.shared.protocol.keys import QUEUES
from quire.shared.redis.clients import command_client
from tests.conftest import QuireProcess
from tests.support.faults.calls import FAST, REQUESTS, assert_same, body, start_streams, undisturbed
from tests.support.faults.stack import FaultStack, Stream

pytestmark = pytest.mark.faults

GARBAGE = (
    b"",
    b"\xff\xfe",
    b"\xc1",
    b"\x80",
    b"\x93\x01\x02\x03",
    b"\xdd\xff\xff\xff\xff",
    b"\xd4\x01\x00",
    b"x" * 5000,
)


class Serving:
    """A gateway, a worker, and the answers of their clients without corruption."""

    def __init__(self, stack: FaultStack) -> None:
        self.stack = stack
        self.gateway, self.url = stack.gateway()
        self.worker = stack.worker("a", *FAST)
        self.expected = undisturbed(self.url)

    @property
    def processes(self) -> tuple[QuireProcess, QuireProcess]:
        return self.gateway, self.worker

    def channel(self) -> bytes:
        found: list[bytes] = self.stack.redis.pubsub_channels(self.stack.keys.channel("*").replace("{", "[{]"))
        (channel,) = found
        return channel

    def submit(self, data: bytes) -> str:
        """Submit a request with this body, as a gateway of another version might."""

        async def submit() -> str:
            client = command_client(self.stack.redis_server.url)
            try:
                broker = Broker(client, self.stack.keys.lane)
                terms = Admission(gateway="none", cost=1, bounds=QueueBounds(10**6, 10**9))
                return (await broker.submit(new_id(), data, terms)).id
            finally:
                await client.aclose()

        return asyncio.run(submit())

    def outcome(self, request_id: str) -> bytes | None:
        found: bytes | None = self.stack.redis.hget(self.stack.keys.request(request_id), "outcome")
        return found

    def said_of_requests(self) -> int:
        """Count the lines of the worker's log that report a corrupt request."""
        return sum(bool(re.search(r"  request \w+ is corrupt", line)) for line in self.worker.stderr.splitlines())

    def assert_well(self) -> None:
        assert all(process.process.poll() is None for process in self.processes)
        assert_same(start_streams(self.url), self.expected)
        self.stack.assert_invariants()


@pytest.fixture(scope="module")
def module_serving(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Serving]:
    stack = FaultStack(tmp_path_factory.mktemp("corrupt"), long_model)
    try:
        yield Serving(stack)
    finally:
        stack.close()


@pytest.fixture
def serving(module_serving: Serving) -> Iterator[Serving]:
    """A stack with streams in the middle of their answers, which the corruption must not affect."""
    streams = start_streams(module_serving.url)
    yield module_serving
    assert_same(streams, module_serving.expected)
    module_serving.assert_well()


def test_entries_of_a_queue_that_are_none_are_taken_off_it(serving: Serving) -> None:
    stack = serving.stack
    entries: list[dict[bytes, bytes]] = [{b"surprise": b"x"}, {b"cost": b"1"}, {b"id": b"x" * 100_000, b"cost": b"-1"}]
    entries += [{b"id": data, b"cost": data} for data in GARBAGE]
    for name in QUEUES:
        for entry in entries:
            stack.redis.xadd(stack.keys.queue(name), entry)  # type: ignore[arg-type]
    stack.wait(lambda: sum(stack.redis.xlen(stack.keys.queue(name)) for name in QUEUES) <= len(REQUESTS), 20)


def test_the_same_entry_twice_is_one_generation(serving: Serving) -> None:
    """Case 14, seen by the queue: an entry that was delivered twice is one request."""
    stack = serving.stack
    before = stack.totals()["accepted"]
    stream = Stream(serving.url, body("greedy") | {"stream": True})
    stack.wait(lambda: stream.response_headers)
    entry = {"id": stream.response_headers["x-request-id"], "cost": "1"}
    for name in QUEUES:
        stack.redis.xadd(stack.keys.queue(name), entry)  # type: ignore[arg-type]
    assert_same({"greedy": stream}, serving.expected)
    assert stack.totals()["accepted"] == before + 1


def test_bodies_that_cannot_be_read_end_as_errors(serving: Serving) -> None:
    ids = [serving.submit(data) for data in GARBAGE]
    serving.stack.wait(lambda: all(serving.outcome(request_id) == b"error" for request_id in ids), 20)
    assert serving.said_of_requests() == 1


@pytest.mark.promise
def test_requests_whose_hash_is_corrupt_end_as_errors(serving: Serving) -> None:
    """A queued request ends when a worker takes it, a running one with its next commit."""
    stack = serving.stack
    fields = ("deadline", "cost", "created", "emitted", "class", "state", "queue", "entry", "gateway", "body")
    serving.worker.send(signal.SIGSTOP)
    try:
        ids = [serving.submit(b"x") for _ in fields]
        for request_id, name in zip(ids, fields, strict=True):
            stack.redis.hset(stack.keys.request(request_id), name, b"\xff")
    finally:
        serving.worker.send(signal.SIGCONT)
    stack.wait(lambda: all(serving.outcome(request_id) == b"error" for request_id in ids), 20)
    for name in ("deadline", "emitted"):
        stream = Stream(serving.url, body("greedy") | {"stream": True, "max_tokens": 1500}).wait_events(5)
        stack.redis.hset(stack.keys.request(stream.response_headers["x-request-id"]), name, b"x")
        assert stream.wait_end().error is not None
        stack.streams.remove(stream)
    assert serving.said_of_requests() == 1


def test_frames_that_are_none_are_dropped_and_said_once(serving: Serving) -> None:
    for data in GARBAGE * 3:
        assert serving.stack.redis.publish(serving.channel(), data) == 1
    serving.gateway.wait_for("published frame is corrupt")
    serving.assert_well()
    assert serving.gateway.stderr.count("published frame is corrupt") == 1


@pytest.mark.parametrize("data", [GARBAGE[1], None], ids=["an item that is none", "an entry without an item"])
def test_an_output_log_that_is_corrupt_ends_its_stream_with_an_error(serving: Serving, data: bytes | None) -> None:
    """The gateway reads the log after a lost message."""
    stack = serving.stack
    stream = Stream(serving.url, body("greedy") | {"stream": True, "max_tokens": 1500}).wait_events(5)
    log = stack.keys.output(stream.response_headers["x-request-id"])
    entry = {b"surprise": b"x"} if data is None else {b"item": data}
    stack.redis.xadd(log, entry, id="100000-0")  # type: ignore[arg-type]
    stack.redis.client_kill_filter(_type="pubsub")
    stream.wait_end()
    assert stream.error is not None
    assert stream.error["code"] in ("generation_failed", "error")
    stack.wait(lambda: serving.outcome(stream.response_headers["x-request-id"]), 20)
    stack.redis.delete(log)
    stack.streams.remove(stream)


def test_cards_and_names_of_workers_that_are_none_count_as_no_worker(serving: Serving) -> None:
    stack = serving.stack
    names = [f"corrupt-{number}" for number in range(len(GARBAGE))]
    seconds, _ = stack.redis.time()
    for name, data in zip(names, GARBAGE, strict=True):
        stack.redis.hset(stack.keys.worker(name), "card", data)
        stack.redis.expire(stack.keys.worker(name), 600)
        stack.redis.zadd(stack.keys.workers, {name: 1000 * seconds})
    stack.redis.zadd(stack.keys.workers, {b"\xff": 1000 * seconds})
    try:
        serving.assert_well()
        ready = Stream(serving.url, {}, method="GET", path="/readyz").wait_end()
        assert (ready.status, ready.answer["workers"]) == (200, 1)
    finally:
        stack.redis.zrem(stack.keys.workers, *names, b"\xff")
        stack.redis.delete(*map(stack.keys.worker, names))


def test_notices_that_are_none_are_dropped(serving: Serving) -> None:
    """The notices are in the mailbox that the worker's next commit reads."""
    stack = serving.stack
    for data in GARBAGE:
        stack.redis.hset(stack.keys.mailbox("a"), mapping={data: b"cancel", b"x" + data: data})
    stack.wait(lambda: not stack.redis.exists(stack.keys.mailbox("a")))
