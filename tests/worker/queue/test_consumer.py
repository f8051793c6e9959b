"""A worker takes requests off its queue: isolated ones, turns of classes, wide ones, and their counts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quire.shared.protocol.broker import Admission, Broker, Claim, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.protocol.keys import PRIORITY_CLASSES, LaneKeys
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome, SamplingParams, StepItem
from quire.shared.redis.clients import blocking_client, command_client
from quire.shared.text.grammar import ANY_OBJECT
from quire.worker.queue.committer import Committer
from quire.worker.queue.consumer import Consumer
from quire.worker.queue.counts import ClaimCounts
from quire.worker.queue.executor import ExecutorStatus
from tests.worker.queue.test_attempt_spans import PARENT, RecordingTracer

KEYS = LaneKeys("lane")

BOUNDS = QueueBounds(requests=100, tokens=1000)


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker stops at the end of its blocking read, for which a test need not wait."""
    monkeypatch.setattr("quire.worker.queue.consumer.BLOCK_S", 0.05)


class Engine:
    """A fake engine that has room and records the requests that it starts."""

    def __init__(self) -> None:
        self.looks = 0
        self.free_rows = 4
        self.displaceable = (0, 0)
        self.started: list[tuple[str, str]] = []
        self.priorities: list[int] = []
        # `free_rows` and `displaceable` after each of the next starts.
        self.then: list[tuple[int, tuple[int, int]]] = []
        # For each prepared request: the thread that prepared it, and the requests started before.
        self.prepared: list[tuple[threading.Thread, list[tuple[str, str]]]] = []
        self.may_start = threading.Event()
        self.finished: list[tuple[str, str]] = []
        self.status = ExecutorStatus(free_blocks=1, running=0, waiting=0, steps=1, slowest_step_s=0.0)

    @property
    def free_rows(self) -> int:
        self.looks += 1
        return self._free_rows

    @free_rows.setter
    def free_rows(self, rows: int) -> None:
        self._free_rows = rows

    def prepare(self, request: GenerationRequest) -> None:
        self.prepared.append((threading.current_thread(), list(self.started)))
        assert self.may_start.wait(60)

    def add(self, request: GenerationRequest, attempt: str, earlier: tuple[StepItem, ...], priority: int) -> None:
        self.started.append((request.id, attempt))
        self.priorities.append(priority)
        if self.then:
            self.free_rows, self.displaceable = self.then.pop(0)

    def finish(self, request_id: str, outcome: str) -> None:
        self.finished.append((request_id, outcome))

    def drop(self, request_id: str, attempt: str) -> None:
        pass


class Lane:
    def __init__(
        self, broker: Broker, reader: QueueReader, incarnation: str, tracer: Any = None, lease_s: float = 3.0
    ) -> None:
        self.broker = broker
        self.reader = reader
        self.engine: Any = Engine()
        self.committer = Committer(broker, "w", on_lost=lambda: self.consumer.reread_pending())
        self.consumer = Consumer(broker, reader, self.committer, self.engine, incarnation, lease_s, tracer)

    async def submit(
        self, request_id: str, priority_class: str, grammar: str = "", n: int = 1, trace: str = ""
    ) -> None:
        request = GenerationRequest(request_id, "m", (3,), SamplingParams(max_tokens=9, grammar=grammar, n=n))
        await self.broker.submit(
            request_id,
            request.encode(),
            Admission(
                gateway="g",
                cost=1,
                bounds=BOUNDS,
                priority_class=priority_class,
                rows=request.rows,
                traceparent=trace,
            ),
        )

    async def isolate(self, request_id: str) -> None:
        """Submit a request that has killed two processes of this worker, and is pending for the next process."""
        await self.submit(request_id, "standard")
        [delivery] = await QueueReader(self.broker.client, "lane", "w").read(1, 0)
        for index in range(3):
            await self.broker.claim(delivery, "w", new_id(), f"process {index}")

    async def until_started(self, count: int) -> list[str]:
        async with asyncio.timeout(60):
            while len(self.engine.started) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return [request_id for request_id, _ in self.engine.started]

    async def look_again(self) -> None:
        """Wait until the engine was asked for its free rows several times more."""
        looks = self.engine.looks
        async with asyncio.timeout(60):
            while self.engine.looks < looks + 6:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def commit(self, request_id: str, start: int) -> None:
        """Commit a token of a request, for the attempt that this worker has."""
        token = dict(self.committer.attempts)[request_id]
        self.committer.put([StepCommit(token, StepItem(request_id, start, (Delta(0, (5,)),)))])

    async def state(self, request_id: str) -> list[bytes | None]:
        found: list[bytes | None] = await self.broker.client.hmget(
            KEYS.request(request_id), "state", "outcome", "waits"
        )
        return found


@asynccontextmanager
async def consuming(
    redis_url: str, incarnation: str = "this process", tracer: Any = None, lease_s: float = 3.0
) -> AsyncIterator[Lane]:
    commands, blocking = command_client(redis_url), blocking_client(redis_url)
    try:
        broker = Broker(commands, "lane")
        await broker.create_groups()
        yield Lane(broker, QueueReader(blocking, "lane", "w"), incarnation, tracer, lease_s)
    finally:
        await commands.aclose()
        await blocking.aclose()


@asynccontextmanager
async def at_work(lane: Lane) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(lane.consumer.run()), asyncio.create_task(lane.committer.run(lane.engine))]
    try:
        yield
    finally:
        lane.consumer.stop()
        lane.committer.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)


async def test_isolated_requests_begin_one_after_the_other_each_cleared_by_its_first_token(redis_url: str) -> None:
    async with consuming(redis_url) as lane:
        for name in ("a", "b"):
            await lane.isolate(name)
        async with at_work(lane):
            first, *_ = await lane.until_started(1)
            other = {"a": "b", "b": "a"}[first]
            assert await lane.state(first) == [b"running", None, None]
            assert await lane.state(other) == [b"running", None, b"1"]
            assert lane.consumer.waiting_isolated == [(other, dict(lane.committer.attempts)[other])]
            await lane.commit(first, 0)
            assert await lane.until_started(2) == [first, other]
            assert lane.consumer.waiting_isolated == []


async def test_a_request_is_isolated_after_two_processes_of_one_worker_have_left_it_and_not_after_two_reads_of_one(
    redis_url: str,
) -> None:
    for incarnation, is_isolated in (("1", False), ("1", False), ("2", False), ("3", True)):
        async with consuming(redis_url, incarnation) as lane:
            if incarnation == "1":
                await lane.submit("a", "standard")
            async with at_work(lane):
                assert await lane.until_started(1) == ["a"]
            assert lane.engine.priorities == [0 if is_isolated else 1]


async def test_an_isolated_request_whose_attempt_was_lost_runs_under_its_next_one(redis_url: str) -> None:
    """Redis came back without the claim, but the entry is still pending for this worker."""
    async with consuming(redis_url) as lane:
        for name in ("a", "b"):
            await lane.isolate(name)
        async with at_work(lane):
            await lane.until_started(1)
            attempts = dict(lane.committer.attempts)
            lane.committer.lose(attempts.items(), lane.engine)
            await lane.until_started(2)
            second, attempt = lane.engine.started[1]
            assert dict(lane.committer.attempts)[second] == attempt != attempts[second]
            await lane.commit(second, 0)
            await lane.until_started(3)
            assert {request_id for request_id, _ in lane.engine.started[1:]} == {"a", "b"}


async def test_an_isolated_request_that_is_cancelled_while_it_waits_never_begins(redis_url: str) -> None:
    async with consuming(redis_url) as lane:
        for name in ("a", "b", "c"):
            await lane.isolate(name)
        async with at_work(lane):
            first, *_ = await lane.until_started(1)
            cancelled, last = sorted({"a", "b", "c"} - {first})
            assert await lane.broker.cancel(cancelled) == "flagged"
            await lane.commit(first, 0)
            assert await lane.until_started(2) == [first, last]
            assert (await lane.state(cancelled))[:2] == [b"done", b"cancelled"]
            assert not lane.committer.runs(cancelled)


async def test_a_worker_whose_last_isolated_request_never_began_has_nothing_to_wait_for(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: Any = Broker.begin

    async def too_late(broker: Broker, claim: Claim) -> bool:
        assert await broker.cancel(claim.request_id) == "flagged"
        return bool(await begin(broker, claim))

    monkeypatch.setattr(Broker, "begin", too_late)
    async with consuming(redis_url) as lane:
        await lane.isolate("a")
        async with at_work(lane):
            async with asyncio.timeout(60):
                while (await lane.state("a"))[0] != b"done":  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await lane.committer.all_ended()
            assert not lane.engine.started


async def test_the_reply_of_an_attempt_that_is_over_clears_nothing(redis_url: str) -> None:
    async with consuming(redis_url) as lane:
        await lane.isolate("a")
        async with at_work(lane):
            await lane.until_started(1)
            old = dict(lane.committer.attempts)["a"]
            lane.committer.lose([("a", old)], lane.engine)
            await lane.until_started(2)
            new = dict(lane.committer.attempts)["a"]
            claim = Claim("a", new, "g", "standard", b"", 0, 0, 2, ())
            commits = [StepCommit(old, StepItem("a", 0, (Delta(0, (5,)),)))]
            reply = await lane.broker.commit_step("w", commits)
            assert reply.lost == (("a", old),)
            lane.committer._apply(reply, commits, lane.engine)
            assert lane.committer.lacks_progress(claim)


@pytest.mark.parametrize("room", [1, 2])
async def test_each_lower_class_has_its_turn_with_one_request_that_counts_as_of_the_highest(
    redis_url: str, room: int
) -> None:
    async with consuming(redis_url) as lane:
        for index in range(20):
            await lane.submit(f"i{index}", "interactive")
        for index in range(3):
            await lane.submit(f"s{index}", "standard")
            await lane.submit(f"b{index}", "batch")
        count = 8 * room
        lane.engine.free_rows = room
        lane.engine.then = [(room, (0, 0))] * (count - 1) + [(0, (0, 0))]
        async with at_work(lane):
            started = await lane.until_started(count)
    often, rest = "i" * 3 * room, "i" * (room - 1)
    assert "".join(name[0] for name in started) == f"{often}s{rest}{often}b{rest}"
    assert lane.engine.priorities == [0] * count


async def until_left(lane: Lane, request_id: str) -> None:
    """Wait until the worker has left a request because of its rows, and for some reads more."""
    async with asyncio.timeout(60):
        for _ in range(3):
            while lane.reader.too_wide != request_id:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            lane.reader.too_wide = ""


@pytest.mark.parametrize(
    "priority_class",
    [pytest.param(one, marks=() if one == "standard" else pytest.mark.slow) for one in PRIORITY_CLASSES],
)
async def test_a_request_that_is_too_wide_is_left_to_others_and_then_taken_in_any_case(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, priority_class: str
) -> None:
    monkeypatch.setattr("quire.worker.queue.consumer.WIDE_S", 600)
    async with consuming(redis_url) as lane:
        for name in ("first", "second", "third"):
            await lane.submit(name, priority_class, n=6)
            await lane.submit(f"behind {name}", priority_class)
        async with at_work(lane):
            await until_left(lane, "first")
            other = QueueReader(lane.broker.client, "lane", "other")
            assert [one.request_id for one in await other.read(6, 0)] == ["first"]
            assert await lane.until_started(1) == ["behind first"]
            # As soon as there are rows for it, it is taken.
            await until_left(lane, "second")
            assert len(lane.engine.started) == 1
            lane.engine.free_rows = 6
            lane.engine.then = [(4, (0, 0))]
            assert await lane.until_started(3) == ["behind first", "second", "behind second"]
            # No other worker has the rows either.
            await until_left(lane, "third")
            assert len(lane.engine.started) == 3
            monkeypatch.undo()
            assert (await lane.until_started(5))[3:] == ["third", "behind third"]


async def test_a_turn_of_a_lower_class_waits_for_the_rows_of_its_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide request of the lowest class would never run if its turn passed each time that rows are short."""
    monkeypatch.setattr("quire.worker.queue.consumer.WIDE_S", 600)
    async with consuming(redis_url) as lane:
        lane.engine.free_rows = 2
        await lane.submit("wide", "batch", n=4)
        names = [f"i{index}" for index in range(40)]
        for name in names:
            await lane.submit(name, "interactive")
        async with at_work(lane):
            await until_left(lane, "wide")
            taken = len(lane.engine.started)
            assert 0 < taken < 40
            await until_left(lane, "wide")
            assert len(lane.engine.started) == taken
            lane.engine.free_rows = 4
            assert "wide" in await lane.until_started(taken + 1)
            assert set(await lane.until_started(41)) == {"wide", *names}


async def test_empty_turns_do_not_renew_the_wait_of_a_wide_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lower classes have their turns while it is left to others, with or without a request."""
    monkeypatch.setattr("quire.worker.queue.consumer.WIDE_S", 600)
    async with consuming(redis_url) as lane:
        await lane.submit("wide", "interactive", n=6)
        await lane.submit("behind", "interactive")
        for index in range(2):
            await lane.submit(f"s{index}", "standard")
        async with at_work(lane):
            assert await lane.until_started(2) == ["s0", "s1"]
            # Several times as long as four reads, among which there is a turn.
            monkeypatch.setattr("quire.worker.queue.consumer.WIDE_S", 0.4)
            assert (await lane.until_started(4))[2:] == ["wide", "behind"]
    assert lane.engine.priorities == [0] * 4


async def test_a_full_engine_takes_one_after_the_other_of_those_that_may_displace_others(redis_url: str) -> None:
    async with consuming(redis_url) as lane:
        for name in ("standard", "batch", "interactive"):
            for index in range(2):
                await lane.submit(f"{name}{index}", name)
        lane.engine.free_rows = 0
        lane.engine.displaceable = (2, 1)
        lane.engine.then = [(0, (0, 1)), (0, (0, 0))]
        async with at_work(lane):
            assert await lane.until_started(2) == ["interactive0", "standard0"]
            await lane.look_again()
    assert lane.engine.priorities == [0, 1]


async def test_a_full_engine_waits_for_a_request_that_may_displace_others_and_gets_it_at_once(redis_url: str) -> None:
    """Lines of a batch wait all the time, so `wake` would end each of its waits."""
    async with consuming(redis_url) as lane:
        for index in range(3):
            await lane.submit(f"batch{index}", "batch")
        lane.engine.free_rows = 0
        lane.engine.displaceable = (1, 1)
        lane.engine.then = [(0, (0, 0))]
        reads, waits = 0, asyncio.Event()
        reader = lane.consumer._reader
        read, wait = reader.read, reader.wait

        async def counted(*arguments: Any) -> Any:
            nonlocal reads
            reads += 1
            return await read(*arguments)

        async def waiting(queues: Any, block_ms: int) -> Any:
            assert reads == 2, "one for each class, before the wait"
            waits.set()
            return await wait(queues, 3_600_000)

        reader.read, reader.wait = counted, waiting  # type: ignore[method-assign]
        async with at_work(lane):
            await asyncio.wait_for(waits.wait(), 60)
            await lane.submit("urgent", "interactive")
            assert await lane.until_started(1) == ["urgent"]
            assert reads == 2, "it came with the wait"


async def test_what_another_worker_does_not_renew_is_taken_over_where_there_is_room(redis_url: str) -> None:
    async with consuming(redis_url, lease_s=0.05) as lane:
        for name in ("a", "b", "c"):
            await lane.submit(name, "standard")
        assert len(await QueueReader(lane.broker.client, "lane", "dead").read(3, 0)) == 3
        asked: list[int] = []
        reclaim: Any = lane.broker.reclaim

        async def noted(worker_id: str, lease_ms: int, count: int) -> Any:
            asked.append(count)
            assert asyncio.get_running_loop().time() >= may_at
            assert (worker_id, lease_ms) == ("w", 50)
            return await reclaim(worker_id, lease_ms, count)

        lane.broker.reclaim = noted  # type: ignore[method-assign]
        lane.engine.free_rows = 2
        lane.engine.then = [(1, (0, 0)), (0, (0, 0))]
        may_at = asyncio.get_running_loop().time() + 0.049  # no worker could renew before
        lane.consumer.postpone_reclaim()
        task = asyncio.create_task(lane.consumer.run_reclaim())
        assert await lane.until_started(2) == ["a", "b"]
        count = len(asked)
        await lane.look_again()
        assert len(asked) == count, "a full engine takes nothing over"
        lane.engine.free_rows = 1
        assert await lane.until_started(3) == ["a", "b", "c"]
        lane.consumer.stop()
        await asyncio.wait_for(task, 60)
        assert set(asked) == {1, 2}


async def test_what_runs_here_is_not_taken_over_again(redis_url: str) -> None:
    """This worker did not renew the lease of its own running request in time."""
    async with consuming(redis_url, lease_s=0.01) as lane:
        await lane.submit("a", "standard")
        await lane.consumer._take(await QueueReader(lane.broker.client, "lane", "w").read(1, 0))
        found: list[int] = []
        reclaim: Any = lane.broker.reclaim

        async def noted(*args: Any) -> Any:
            deliveries = await reclaim(*args)
            found.append(len(deliveries))
            return deliveries

        lane.broker.reclaim = noted  # type: ignore[method-assign]
        task = asyncio.create_task(lane.consumer.run_reclaim())
        async with asyncio.timeout(60):
            while not any(found):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        lane.consumer.stop()
        await asyncio.wait_for(task, 60)
        assert len(lane.engine.started) == 1


async def test_a_takeover_whose_answer_was_lost_is_found_by_looking_back(redis_url: str) -> None:
    async with consuming(redis_url) as lane:
        await lane.submit("a", "standard")
        await QueueReader(lane.broker.client, "lane", "dead").read(1, 0)
        reclaim: Any = lane.broker.reclaim

        async def lost(worker_id: str, lease_ms: int, count: int) -> Any:
            if await reclaim(worker_id, lease_ms, count):
                lane.engine.free_rows = 0
                lane.consumer._lease_s = 60.0
                raise RedisConnectionError
            return []

        lane.broker.reclaim = lost  # type: ignore[method-assign]
        lane.consumer._lease_s = 0.01
        async with at_work(lane):
            await lane.submit("b", "standard")
            assert await lane.until_started(1) == ["b"], "the worker has read its pending entries"
            task = asyncio.create_task(lane.consumer.run_reclaim())
            assert await lane.until_started(2) == ["b", "a"]
        await asyncio.wait_for(task, 60)
        assert lane.consumer._reclaims_at > asyncio.get_running_loop().time() + 30, "nobody can have renewed"


async def test_a_grammar_is_made_beside_the_loop_and_a_cancel_meanwhile_is_obeyed(redis_url: str) -> None:
    async with consuming(redis_url) as lane:
        await lane.submit("plain", "interactive")
        await lane.submit("json", "standard", grammar=ANY_OBJECT)
        async with at_work(lane):
            async with asyncio.timeout(60):
                while not lane.engine.prepared:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                assert await lane.broker.cancel("json") == "flagged"
                while not lane.committer._early_cancels:
                    lane.committer.put([])
                    await asyncio.sleep(0.005)
            lane.engine.may_start.set()
            assert await lane.until_started(2) == ["plain", "json"]
            async with asyncio.timeout(60):
                while not lane.engine.finished:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
    [(thread, started)] = lane.engine.prepared
    assert thread is not threading.main_thread()
    assert [name for name, _ in started] == ["plain"]
    assert lane.engine.finished == [("json", "cancelled")]


async def test_what_was_handed_back_before_its_first_token_is_a_migration_and_waited_once(redis_url: str) -> None:
    client = command_client(redis_url)
    try:
        broker = Broker(client, "lane")
        await broker.create_groups()
        await broker.submit("r", b"body", Admission(gateway="g", cost=1, bounds=BOUNDS))
        counts = ClaimCounts()
        for worker in ("first", "second"):
            [delivery] = await QueueReader(client, "lane", worker).read(1, 0)
            claim = await broker.claim(delivery, worker, new_id())
            assert claim is not None
            counts.note(claim)
            assert await broker.release([("r", claim.attempt)]) == 1
        assert (counts.first, counts.migrated, counts.waited_s["standard"].count) == (1, 1, 1)
    finally:
        await client.aclose()


async def test_a_traced_request_has_the_spans_of_its_attempt_and_another_has_none(redis_url: str) -> None:
    tracer = RecordingTracer()
    async with consuming(redis_url, tracer=tracer) as lane:
        await lane.submit("traced", "standard", trace=PARENT)
        await lane.submit("other", "standard")
        async with at_work(lane):
            for name in await lane.until_started(2):
                end = StepItem(name, 0, (Delta(0, (5,), "stop"),), Outcome("stop"))
                lane.committer.put([StepCommit(dict(lane.committer.attempts)[name], end)])
            await asyncio.wait_for(lane.committer.all_ended(), 10)
    assert [(span.name, span.ended) for span in tracer.spans] == [("queue", True), ("prefill", True), ("decode", True)]
    assert {(span.attributes["quire.request.id"], span.attributes["quire.worker.id"]) for span in tracer.spans} == {
        ("traced", "w")
    }
    assert tracer.spans[1].attributes["gen_ai.usage.input_tokens"] == 1
    assert tracer.spans[2].attributes["gen_ai.usage.output_tokens"] == 1


async def until_logged(caplog: pytest.LogCaptureFixture, level: int) -> None:
    async with asyncio.timeout(60):
        while level not in [record.levelno for record in caplog.records]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_worker_goes_on_after_redis_has_lost_its_data_and_after_it_has_refused_to_read(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost data is one warning: the worker makes its groups again. A refusal is an error for an operator."""
    caplog.set_level(logging.WARNING)
    async with consuming(redis_url) as lane, at_work(lane):
        await lane.submit("a", "standard")
        assert await lane.until_started(1) == ["a"]
        await lane.broker.client.flushall()
        await until_logged(caplog, logging.WARNING)
        await lane.submit("b", "standard")
        assert await lane.until_started(2) == ["a", "b"]
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        queue = KEYS.queue("interactive")
        await lane.broker.client.set(queue, "no stream")
        await until_logged(caplog, logging.ERROR)
        await lane.broker.client.delete(queue)
        await lane.submit("c", "interactive")
        assert await lane.until_started(3) == ["a", "b", "c"]


async def test_takeovers_go_on_after_redis_has_lost_its_data_and_after_it_was_away(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The reads of new requests warn of lost data, and make the groups again."""
    caplog.set_level(logging.WARNING)
    async with consuming(redis_url, lease_s=0.02) as lane:
        is_away, failures = False, 0
        reclaim: Any = lane.broker.reclaim

        async def noted(*args: Any) -> Any:
            nonlocal failures
            try:
                if is_away:
                    raise RedisConnectionError
                return await reclaim(*args)
            except RedisError:
                failures += 1
                raise

        lane.broker.reclaim = noted  # type: ignore[method-assign]
        await lane.broker.client.flushall()
        task = asyncio.create_task(lane.consumer.run_reclaim())
        async with asyncio.timeout(60):
            while failures < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not caplog.records
        is_away = True
        await until_logged(caplog, logging.WARNING)
        is_away = False
        await lane.broker.create_groups()
        await lane.submit("a", "standard")
        assert await QueueReader(lane.broker.client, "lane", "dead").read(1, 0)
        assert await lane.until_started(1) == ["a"]
        lane.consumer.stop()
        await asyncio.wait_for(task, 10)
