"""The committer between a real Redis and a fake engine that records its calls."""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.shared.protocol.broker import (
    Admission,
    Broker,
    Claim,
    ComputedTokens,
    QueueBounds,
    QueueReader,
    StepCommit,
    StepReply,
    new_id,
)
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import Delta, Outcome, PromptReport, StepItem, step_items
from quire.shared.redis.clients import command_client
from quire.worker.queue import committer as module
from quire.worker.queue.committer import MAX_EARLY_CANCELS, Committer, merge

KEYS = LaneKeys("lane")
BOUNDS = QueueBounds(requests=100, tokens=1000)


class Told:
    """A fake engine that records its calls."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str]] = []
        self.dropped: list[tuple[str, str]] = []

    def finish(self, request_id: str, outcome: str) -> None:
        self.finished.append((request_id, outcome))

    def drop(self, request_id: str, attempt: str) -> None:
        self.dropped.append((request_id, attempt))


class Lane:
    """A broker, a running committer, and the calls to its engine."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.engine = Told()
        self.committer = Committer(broker, "w", on_lost=lambda: None)

    async def start(self, request_id: str, spans: Any = None, **options: Any) -> Claim:
        await self.broker.submit(request_id, b"body", Admission(gateway="g", cost=1, bounds=BOUNDS, **options))
        [delivery] = await QueueReader(self.broker.client, "lane", "w").read(1, 0)
        claim = await self.broker.claim(delivery, "w", new_id(), "process")
        assert claim is not None
        assert self.committer.register(claim, claim.logged, spans)
        return claim

    async def log(self, request_id: str, tokens: int) -> list[StepItem]:
        """Return the output log as soon as it has `tokens` tokens."""
        async with asyncio.timeout(60):
            while not (items := await self.broker.read_output(request_id)) or items[-1].end < tokens:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return items


@asynccontextmanager
async def committing(redis_url: str) -> AsyncIterator[Lane]:
    client = command_client(redis_url)
    lane = Lane(Broker(client, "lane"))
    await lane.broker.create_groups()
    task = asyncio.create_task(lane.committer.run(lane.engine))  # type: ignore[arg-type]
    yield lane
    lane.committer.stop()
    await task
    await client.aclose()


def step(claim: Claim, start: int, token_ids: tuple[int, ...], outcome: str = "") -> StepCommit:
    deltas = (Delta(0, token_ids, outcome or None),)
    return StepCommit(claim.attempt, StepItem(claim.request_id, start, deltas, Outcome(outcome) if outcome else None))


async def test_steps_that_gather_go_out_as_one_item_for_each_request(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        first, second = await lane.start("r1"), await lane.start("r2")
        lane.committer.put([step(first, 0, (1,)), step(second, 0, (5,))])
        lane.committer.put([step(first, 1, (2,))])
        assert lane.committer.num_uncommitted == 2
        lane.committer.put([step(first, 2, (3,), "stop")])
        [item] = await lane.log("r1", 3)
        assert item == StepItem("r1", 0, (Delta(0, (1, 2, 3), "stop"),), Outcome("stop"))
        assert [one.deltas for one in await lane.log("r2", 1)] == [(Delta(0, (5,)),)]
        assert (lane.committer.num_uncommitted, lane.committer.counts.ended["stop"]) == (0, 1)
        assert not lane.committer.runs("r1")


async def test_what_was_computed_for_attempts_that_are_over_falls_away(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        claim, lost = await lane.start("r"), await lane.start("lost")
        lane.committer.lose([("lost", lost.attempt)], lane.engine)  # type: ignore[arg-type]
        stale = StepCommit(new_id(), step(claim, 0, (66,)).item)
        lane.committer.put([stale, step(lost, 0, (66,)), step(claim, 0, (1,))])
        assert [item.deltas for item in await lane.log("r", 1)] == [(Delta(0, (1,)),)]
        assert lane.engine.dropped == [("lost", lost.attempt)]
        assert lane.committer.counts.fenced == 0, "Redis is not asked"
        assert [item.deltas for item in lane.committer._attempts["r"].sent()] == [(Delta(0, (1,)),)]


class Spans:
    """A fake for the tracing spans of an attempt."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def first_tokens(self) -> None:
        self.told.append(("first", 0))

    def end(self, outcome: str, tokens: int) -> None:
        self.told.append((outcome, tokens))


async def test_a_trace_is_told_of_the_first_tokens_and_of_the_end_whatever_that_is(redis_url: str) -> None:
    spans = {name: Spans() for name in ("ended", "lost", "released")}
    async with committing(redis_url) as lane:
        claims = {name: await lane.start(name, spans[name]) for name in spans}
        ended = claims["ended"]
        lane.committer.put([StepCommit(new_id(), step(ended, 0, (1,)).item)])
        lane.committer.put([StepCommit(ended.attempt, StepItem("ended", 0, ()))])
        assert spans["ended"].told == [], "no token of this attempt"
        for index, outcome in enumerate(("", "", "stop")):
            lane.committer.put([step(ended, index, (index,), outcome)])
            await lane.log("ended", index + 1)
        lane.committer.lose([("lost", claims["lost"].attempt)], lane.engine)  # type: ignore[arg-type]
        lane.committer.released([("released", new_id())])
        assert lane.committer.runs("released"), "another attempt has been handed back"
        lane.committer.released([("released", claims["released"].attempt)])
        await asyncio.wait_for(lane.committer.all_ended(), 60)
        assert not lane.committer._first_awaited
    assert [one.told for one in spans.values()] == [[("first", 0), ("stop", 3)], [("lost", 0)], [("released", 0)]]


async def test_who_loses_the_last_attempt_without_a_commit_has_nothing_to_wait_for(redis_url: str) -> None:
    """The worker did not renew its leases, and its engine has no further step."""
    async with committing(redis_url) as lane:
        claim = await lane.start("r")
        lane.committer.lose([("r", claim.attempt)], lane.engine)  # type: ignore[arg-type]
        await asyncio.wait_for(lane.committer.all_ended(), 60)


async def test_a_log_that_loses_its_end_gets_it_again_each_time_cut_as_it_was(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        claim = await lane.start("r")
        client, output = lane.broker.client, KEYS.output("r")
        for index in range(3):
            lane.committer.put([step(claim, index, (index,))])
            await lane.log("r", index + 1)
        for count, outcome in ((3, ""), (4, "length")):
            await client.xdel(output, *(f"{entry}-0" for entry in range(2, count + 1)))
            await client.execute_command("XSETID", output, "1-0")
            await client.hset(KEYS.request("r"), "emitted", "1")
            lane.committer.put([step(claim, count, (count,), outcome)])
            items = await lane.log("r", count + 1)
            assert [item.deltas[0].token_ids for item in items] == [(index,) for index in range(count + 1)]
        assert items[-1].outcome == Outcome("length")
        assert (lane.committer.counts.resent, lane.committer.counts.ended["length"]) == (2, 1)


async def test_what_a_request_has_emitted_is_nothing_for_the_garbage_collector(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        claim = await lane.start("r")
        for index in range(20):
            lane.committer.put([step(claim, index, (index,))])
            await lane.log("r", index + 1)
        attempt = lane.committer._attempts["r"]
        assert len(attempt.sent()) == 20
        assert [one for one in gc.get_referents(attempt) if gc.is_tracked(one)] == [type(attempt)]


def test_commits_of_two_attempts_at_a_request_are_not_merged() -> None:
    old, new = (StepCommit(name, StepItem("r", start, (Delta(0, (1,)),))) for name, start in (("a", 0), ("b", 0)))
    assert merge([old, new]) == [old, new]


async def test_what_gathered_while_postpone_reclaim_goes_out_in_bounded_commits(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.queue.committer.MAX_COMMITS", 5)
    async with committing(redis_url) as lane:
        one, other = await lane.start("r1"), await lane.start("r2")
        for index in range(10):
            lane.committer.put([step(one, index, (index,)), step(other, index, (index,))])
        for request_id in ("r1", "r2"):
            items = await lane.log(request_id, 10)
            assert [item.end - item.start for item in items] == [2] * 5  # two steps in each commit
        assert [token for item in items for delta in item.deltas for token in delta.token_ids] == list(range(10))


def embedding(claim: Claim, size: int) -> StepCommit:
    return StepCommit(claim.attempt, StepItem(claim.request_id, 0, (), Outcome("stop", embedding=bytes(size))))


async def test_embeddings_count_by_their_size_in_bounded_commits(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.queue.committer.MAX_COMMITS", 40)
    sizes: list[int] = []
    async with committing(redis_url) as lane:
        commit: Any = lane.broker.commit_step

        async def counts(worker_id: str, packed: Any, *args: Any) -> StepReply:
            sizes.append(len(packed.items))
            reply: StepReply = await commit(worker_id, packed, *args)
            return reply

        lane.broker.commit_step = counts  # type: ignore[method-assign]
        claims = [await lane.start(f"r{index}") for index in range(6)]
        for claim in claims:
            lane.committer.put([embedding(claim, 1024)])  # as large as 16 results
        await lane.committer.all_ended()
        for claim in claims:
            [item] = await lane.broker.read_output(claim.request_id)
            assert item.outcome == Outcome("stop", embedding=bytes(1024))
    assert [size for size in sizes if size] == [2, 2, 2]


async def test_a_commit_that_fails_is_tried_again_after_longer_and_longer_waits(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with committing(redis_url) as lane:
        claim = await lane.start("r")
        commit: Any = lane.broker.commit_step

        async def fails(*args: Any) -> StepReply:
            reply: StepReply = await commit(*args)  # succeeds, though the reply may be lost
            if len(waits) < 7:
                raise RedisConnectionError
            return reply

        lane.broker.commit_step = fails  # type: ignore[method-assign]
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
        lane.committer.put([step(claim, 0, (1,), "stop")])
        await lane.committer.all_ended()
        assert await lane.log("r", 1) == [step(claim, 0, (1,), "stop").item]
        assert lane.committer.counts.failed == 7
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def test_a_merged_item_has_the_report_of_the_first_and_the_end_of_the_last() -> None:
    report, end = PromptReport(9, 4), Outcome("stop")
    items = [StepItem("r", 0, (Delta(0, (1,)),), None, report), StepItem("r", 1, (Delta(0, (2,), "stop"),), end)]
    [(attempt, merged)] = merge([StepCommit("token", item) for item in items])
    assert (attempt, merged) == ("token", StepItem("r", 0, (Delta(0, (1, 2), "stop"),), end, report))


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 1)))), st.booleans(), st.sampled_from([1, 3, 256]))
def test_merged_commits_have_every_token_in_its_place(
    made: list[tuple[int, set[int]]], are_scored: bool, most: int
) -> None:
    """The merged steps belong to several requests. In each step one choice, both or neither got a token and record."""
    steps, ends = [], {0: 0, 1: 0, 2: 0}
    for number, (request, choices) in enumerate(made):
        records = struct.pack("<f", -number) if are_scored else None
        deltas = tuple(Delta(choice, (number,), logprobs=records) for choice in sorted(choices))
        steps.append(StepCommit("attempt", StepItem(f"r{request}", ends[request], deltas)))
        ends[request] += len(deltas)
    steps += [StepCommit("attempt", StepItem(f"r{one}", end, (), Outcome("stop"))) for one, end in ends.items()]

    def flat(commits: list[StepCommit], request: int) -> list[tuple[int, int, bytes | None]]:
        found = [commit.item for commit in commits if commit.item.request_id == f"r{request}"]
        assert [item.start for item in found] == [0, *(item.end for item in found[:-1])]
        assert [item.outcome is not None for item in found] == [False] * (len(found) - 1) + [True]
        parts = [delta for item in found for delta in item.deltas]
        return [
            (delta.choice, token, delta.logprobs and delta.logprobs[4 * at : 4 * at + 4])
            for delta in parts
            for at, token in enumerate(delta.token_ids)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_JOINED", most)
        merged = merge(steps)
    assert all(flat(merged, request) == flat(steps, request) for request in ends)
    assert all(len(delta.token_ids) <= most for commit in merged for delta in commit.item.deltas)
    if most == 256 and all(choices <= {0} for _, choices in made):
        assert len(merged) == len(ends)


async def test_cancellations_that_came_after_the_end_do_not_keep_one_from_coming_early(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        late = tuple(f"over{index}" for index in range(MAX_EARLY_CANCELS))
        lane.committer._apply(StepReply((), late, (), {}), [], lane.engine)  # type: ignore[arg-type]
        lane.committer._apply(StepReply((), ("early",), (), {}), [], lane.engine)  # type: ignore[arg-type]
        assert len(lane.committer._early_cancels) == MAX_EARLY_CANCELS
        claim = Claim("early", "token", "g", "standard", b"", 0, 0, 0, ())
        assert not lane.committer.register(claim, ())


def test_the_log_of_an_attempt_may_be_longer_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long request with log-probabilities has such a log. A worker that could not read the log would fail."""
    monkeypatch.setattr(step_items, "MAX_FRAME_BYTES", 1000)
    items = [StepItem("r", at, (Delta(0, (at,), logprobs=bytes(164)),)) for at in range(100)]
    assert module.Attempt("attempt", bytearray(b"".join(item.encode() for item in items))).sent() == items
    assert module.Attempt("attempt", bytearray()).sent() == []


LINE = {"priority_class": "batch", "is_background": True}


async def logged_tokens(lane: Lane, request_id: str) -> list[tuple[int, ...]]:
    items = await lane.broker.read_output(request_id)
    return [token_ids for item in items for _, token_ids, *_ in item.deltas]


async def test_tokens_of_a_batch_line_are_committed_a_few_times_per_second(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOLD_S", 3600)
    async with committing(redis_url) as lane:
        line, chat = await lane.start("line", **LINE), await lane.start("chat")
        for at in range(3):
            lane.committer.put([step(line, at, (at,)), step(chat, at, (at,))])
            await lane.log("chat", at + 1)
        assert not await logged_tokens(lane, "line")
        monkeypatch.setattr(module, "HOLD_S", 0)
        lane.committer.put([step(line, 3, (3,))])
        await lane.log("line", 4)
        assert await logged_tokens(lane, "line") == [(0, 1, 2, 3)]
        assert await logged_tokens(lane, "chat") == [(0,), (1,), (2,)]


async def test_the_end_of_a_batch_line_is_committed_at_once_with_the_tokens_before_it(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        ending, running = await lane.start("ending", **LINE), await lane.start("running", **LINE)
        lane.committer.put([step(ending, 0, (5,)), step(running, 0, (7,))])
        lane.committer.put([step(ending, 1, (6,), "stop")])
        [item] = await lane.log("ending", 2)
        assert (item.deltas[0].token_ids, item.outcome) == ((5, 6), Outcome("stop"))
        assert not await logged_tokens(lane, "running")
        assert lane.committer.counts.ended["stop"] == 1


async def test_tokens_that_are_held_are_committed_when_the_worker_stops(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        line = await lane.start("line", **LINE)
        lane.committer.put([step(line, 0, (5,))])
        lane.committer.put([step(line, 1, (6,))])
        lane.committer.stop()
        await lane.log("line", 2)
        assert await logged_tokens(lane, "line") == [(5, 6)]


async def test_tokens_of_a_batch_line_that_is_lost_are_not_committed(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        line = await lane.start("line", **LINE)
        lane.committer.put([step(line, 0, (5,))])
        lane.committer.lose([("line", line.attempt)], lane.engine)  # type: ignore[arg-type]
        lane.committer.stop()
    assert lane.engine.dropped == [("line", line.attempt)]
    client = command_client(redis_url)
    assert not await Broker(client, "lane").read_output("line")
    await client.aclose()


async def test_a_request_of_the_class_batch_that_has_a_client_is_committed_with_every_step(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        claim = await lane.start("streamed", priority_class="batch")
        lane.committer.put([step(claim, 0, (5,))])
        await lane.log("streamed", 1)


async def test_steps_without_results_ask_for_cancellations_within_a_short_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOLD_S", 60)
    began = time.monotonic()
    async with committing(redis_url) as lane:
        line = await lane.start("line", **LINE)
        await lane.broker.cancel("line")
        commits = 0
        async with asyncio.timeout(60):
            while not lane.engine.finished:
                lane.committer.put([step(line, commits, (5,))])
                commits += 1
                await asyncio.sleep(0.001)
        assert lane.engine.finished == [("line", "cancelled")]
        commit_step = lane.broker.commit_step

        async def slow(*arguments: Any) -> Any:
            await asyncio.sleep(0.003)
            return await commit_step(*arguments)

        monkeypatch.setattr(lane.broker, "commit_step", slow)
        for _ in range(200):
            lane.committer.put([])
            await asyncio.sleep(0.001)
        # At most fifty empty commits per second, not one for each step, and none for steps that end during a commit.
        assert lane.committer.counts.seconds.count <= 2 + (time.monotonic() - began) / module.ASK_S


async def test_what_was_computed_is_committed_with_the_next_step_and_no_later_than_the_end(redis_url: str) -> None:
    async with committing(redis_url) as lane:
        claim = await lane.start("ranked")
        key = KEYS.request("ranked")
        lane.committer.put([], [ComputedTokens("ranked", claim.attempt, 4)])
        async with asyncio.timeout(60):
            while await lane.broker.client.hget(key, "computed") != b"4":
                await asyncio.sleep(0)
                lane.committer.put([])  # the engine's next steps
        lane.committer.put([], [ComputedTokens("ranked", claim.attempt, 8)])
        lane.committer.put([step(claim, 0, (1, 2), "stop")], [ComputedTokens("ranked", claim.attempt, 12)])
        await lane.log("ranked", 2)
        assert await lane.broker.client.hmget(key, "computed", "emitted", "outcome") == [b"12", b"2", b"stop"]
