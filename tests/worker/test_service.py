"""The worker service, also while it drains, between a real Redis and a mock model; the test plays the gateway."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.shared.protocol.broker import Admission, Broker, Claim, QueueBounds, QueueReader, StepReply, new_id
from quire.shared.protocol.keys import GROUP, LaneKeys
from quire.shared.protocol.messages import GenerationRequest, SamplingParams, StepItem, decode_items
from quire.shared.redis.clients import command_client, pubsub_client
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.engine.runner import Runner
from quire.worker.engine_runtime import EngineRuntime
from quire.worker.queue.consumer import Consumer
from quire.worker.service import EngineDied, LeaseTimes, WorkerService
from tests.support.mock_model import EOS, MockModel, continuation
from tests.worker.inspect.test_admin_server import Deadly

MODEL = "mock"

KEYS = LaneKeys(MODEL)

BOUNDS = QueueBounds(requests=100, tokens=100_000)

LIMITS = EngineLimits(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128)


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker stops at the end of its blocking read, for which a test need not wait."""
    monkeypatch.setattr("quire.worker.queue.consumer.BLOCK_S", 0.05)


class Gateway:
    """A fake gateway that submits requests and collects their published items."""

    def __init__(self, redis_url: str) -> None:
        self.client = command_client(redis_url)
        self.broker = Broker(self.client, MODEL)
        self._subscriber = pubsub_client(redis_url)
        self._pubsub = self._subscriber.pubsub()
        self.items: dict[str, list[StepItem]] = {}

    async def __aenter__(self) -> Gateway:
        await self._pubsub.subscribe(KEYS.channel("g1"))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._pubsub.aclose()
        await self._subscriber.aclose()
        await self.client.aclose()

    async def submit(self, prompt: tuple[int, ...], **params: object) -> str:
        params = {"temperature": 0.0, "max_tokens": 8, **params}
        request = GenerationRequest(new_id(), MODEL, prompt, SamplingParams(**params))  # type: ignore[arg-type]
        await self.broker.submit(
            request.id, request.encode(), Admission(gateway="g1", cost=request.cost, bounds=BOUNDS)
        )
        return request.id

    async def listen(self) -> list[StepItem]:
        """Receive the items of the next frame."""
        while True:
            message = await self._pubsub.get_message(timeout=60)
            if message and message["type"] == "message":
                items = list(decode_items(message["data"]))
                for item in items:
                    self.items.setdefault(item.request_id, []).append(item)
                return items

    async def result(self, request_id: str) -> tuple[list[int], str]:
        """Listen until the request ends: its tokens (one choice) and its outcome. The log must agree."""
        async with asyncio.timeout(60):
            while not (request_id in self.items and self.items[request_id][-1].outcome):
                await self.listen()
        items = self.items[request_id]
        assert await self.broker.read_output(request_id) == items
        outcome = items[-1].outcome
        assert outcome is not None
        return [token for item in items for delta in item.deltas for token in delta.token_ids], outcome.name


@asynccontextmanager
async def serving(redis_url: str, model: MockModel | None = None, drain_s: float = 5.0) -> AsyncIterator[Engine]:
    engine = Engine(model or MockModel(), LIMITS, (EOS,), None)
    service = WorkerService(EngineRuntime(engine), model_name=MODEL, worker_id="w1", redis_url=redis_url)
    task = asyncio.create_task(service.run(drain_s))
    try:
        yield engine
    finally:
        service.stop()
        await task
        engine.check_integrity()


async def assert_drained(gateway: Gateway, accepted: int) -> None:
    """Invariants I1 and I5 of docs/protocol.md: everything ended once, and nothing is left behind."""
    totals = {key.decode(): int(value) for key, value in (await gateway.client.hgetall(KEYS.totals)).items()}
    del totals["arrivals"]
    assert totals.pop("accepted") == accepted == sum(totals.values())
    assert (await gateway.client.xpending(KEYS.queue(), GROUP))["pending"] == 0
    assert await gateway.client.xlen(KEYS.queue()) == 0
    load = await gateway.client.hgetall(KEYS.load)
    assert {int(value) for value in load.values()} == {0}
    for key in await gateway.client.keys(f"{KEYS.prefix}req:*") + await gateway.client.keys(f"{KEYS.prefix}out:*"):
        assert await gateway.client.ttl(key) > 0


async def test_requests_are_answered_token_for_token_and_nothing_is_left(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway, serving(redis_url):
        prompts = {await gateway.submit(p, max_tokens=20): p for p in [(i + 1, 5, i) for i in range(20)]}
        for request_id, prompt in prompts.items():
            tokens, outcome = await gateway.result(request_id)
            assert tokens == continuation(prompt, 20)
            assert outcome == ("stop" if tokens[-1] == EOS else "length")
        await assert_drained(gateway, 20)


async def test_a_worker_card_says_what_the_engine_holds(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        async with serving(redis_url):
            await gateway.result(await gateway.submit((1, 2)))
            (card,) = await gateway.broker.live_workers()
            assert (card.model, card.max_model_len, card.total_blocks, card.eos_token_ids) == (MODEL, 128, 64, (EOS,))
        assert await gateway.broker.live_workers() == []


class Paced(MockModel):
    """A model whose steps are not shorter than a commit: each waits for the reply to the step before the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._steps = self._replies = 0
        self._changed = threading.Condition()
        real = Broker.commit_step

        async def counted(broker: Broker, *arguments: Any) -> StepReply:
            reply = await real(broker, *arguments)
            asyncio.get_running_loop().call_soon(self._count)  # once the worker has applied it
            return reply

        monkeypatch.setattr(Broker, "commit_step", counted)

    def _count(self) -> None:
        with self._changed:
            self._replies += 1
            self._changed.notify_all()

    def forward(self, batch, kv_cache):  # type: ignore[no-untyped-def]
        self._steps += 1
        with self._changed:
            assert self._changed.wait_for(lambda: self._replies >= self._steps - 2, 60)
        return super().forward(batch, kv_cache)


async def test_a_running_request_is_cancelled_within_two_steps(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Gateway(redis_url) as gateway, serving(redis_url, Paced(monkeypatch)) as engine:
        request_id = await gateway.submit((1, 2), max_tokens=120, ignore_eos=True)
        await gateway.listen()
        assert await gateway.broker.cancel(request_id) == "flagged"
        steps = engine.num_steps
        tokens, outcome = await gateway.result(request_id)
        assert outcome == "cancelled"
        assert len(tokens) <= steps + 3
        assert engine.scheduler.blocks.num_free == LIMITS.num_blocks
        await assert_drained(gateway, 1)


async def test_a_parked_requests_blocks_are_free_within_two_steps_and_it_goes_on_there(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Gateway(redis_url) as gateway, serving(redis_url, Paced(monkeypatch)) as engine:
        request_id = await gateway.submit((1, 2), max_tokens=60, ignore_eos=True)
        await gateway.listen()
        assert await gateway.broker.park(request_id) == "parked"
        steps = engine.num_steps
        async with asyncio.timeout(60):
            while engine.scheduler.blocks.num_free < LIMITS.num_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert engine.num_steps <= steps + 3  # one step may have begun before the call returned
        assert await gateway.broker.unpark(request_id) == "queued"
        tokens, outcome = await gateway.result(request_id)
        assert (tokens, outcome) == (continuation((1, 2), 60), "length")
        assert engine.scheduler.blocks.num_free == LIMITS.num_blocks
        await assert_drained(gateway, 1)


async def test_a_cancel_whose_notice_was_lost_with_the_reply_is_told_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has no items while its prompt is computed, so only the mailbox can tell the worker."""
    model = MockModel()
    forward, real = model.forward, Broker.commit_step
    lost = []
    is_flagged, is_told = threading.Event(), threading.Event()
    gates = itertools.chain([is_flagged], itertools.repeat(is_told))

    def slow(*arguments: Any) -> torch.Tensor:
        # The first step of the prompt ends after the call to cancel, and the second begins when the worker has heard.
        assert next(gates).wait(60)
        return forward(*arguments)

    async def unlucky(self: Broker, *arguments: Any) -> StepReply:
        reply = await real(self, *arguments)
        if reply.cancelled and not lost:
            lost.append(reply)
            raise RedisConnectionError("the reply was lost")
        if reply.cancelled:
            asyncio.get_running_loop().call_soon(is_told.set)
        return reply

    model.forward = slow  # type: ignore[method-assign]
    monkeypatch.setattr(Broker, "commit_step", unlucky)
    async with Gateway(redis_url) as gateway, serving(redis_url, model):
        request_id = await gateway.submit((1, 2) * 60, max_tokens=8, ignore_eos=True)
        while await gateway.client.hget(KEYS.request(request_id), "state") != b"running":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await gateway.broker.cancel(request_id) == "flagged"
        is_flagged.set()
        assert await gateway.result(request_id) == ([], "cancelled")
        assert lost
        await assert_drained(gateway, 1)


async def test_what_the_engine_cannot_hold_ends_with_an_error_that_names_the_limit(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway, serving(redis_url):
        request_id = await gateway.submit((1,) * 200)
        assert await gateway.result(request_id) == ([], "error")
        outcome = gateway.items[request_id][-1].outcome
        assert outcome is not None
        assert "exceed the context of 128 tokens" in outcome.detail


async def test_a_body_that_cannot_be_read_ends_with_an_error(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway, serving(redis_url):
        await gateway.broker.submit("broken", b"\xc1", Admission(gateway="g1", cost=1, bounds=BOUNDS))
        assert await gateway.result("broken") == ([], "error")
        await assert_drained(gateway, 1)


class Fragile(MockModel):
    """A model that fails in the step that computes the token 66."""

    def forward(self, batch, kv_cache):  # type: ignore[no-untyped-def]
        if 66 in batch.token_ids.tolist():
            raise MemoryError("out of memory")
        return super().forward(batch, kv_cache)


async def test_a_failing_step_ends_its_requests_and_the_worker_goes_on(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Gateway(redis_url) as gateway, serving(redis_url, Fragile()):
        request_id = await gateway.submit((66, 1))
        assert await gateway.result(request_id) == ([], "error")
        prompt = next((i, 7) for i in range(1, 66) if 66 not in continuation((i, 7), 8))
        assert (await gateway.result(await gateway.submit(prompt)))[0] == continuation(prompt, 8)
        await assert_drained(gateway, 2)
    assert "step failed" in caplog.text


async def test_a_worker_that_comes_back_goes_on_where_it_was(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        async with serving(redis_url, drain_s=0.0):
            request_id = await gateway.submit((4, 2), max_tokens=120, ignore_eos=True, temperature=1.0, seed=3)
            await gateway.listen()
        emitted = sum(item.end - item.start for item in gateway.items[request_id])
        assert 0 < emitted < 120
        async with serving(redis_url):
            tokens, outcome = await gateway.result(request_id)
        alone = Engine(MockModel(), LIMITS, (EOS,), None)
        params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=1.0, seed=3)
        assert [[tokens]] == generate(alone, [(4, 2)], params)
        assert outcome == "length"
        await assert_drained(gateway, 1)


async def test_no_more_is_read_than_fits_so_what_waits_waits_in_redis(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        await gateway.broker.create_groups()
        ids = [await gateway.submit((i + 1, 2), max_tokens=60, ignore_eos=True) for i in range(30)]
        async with serving(redis_url):
            await gateway.listen()
            pending = await gateway.client.xpending(KEYS.queue(), GROUP)
            assert 0 < pending["pending"] <= LIMITS.max_num_seqs
            for request_id in ids:
                assert (await gateway.result(request_id))[1] == "length"
        await assert_drained(gateway, 30)


class Slow(MockModel):
    """A model whose every step takes `step_s` seconds on the engine's thread."""

    def __init__(self, step_s: float = 0.05) -> None:
        super().__init__()
        self.step_s = step_s

    def forward(self, batch, kv_cache):  # type: ignore[no-untyped-def]
        time.sleep(self.step_s)
        return super().forward(batch, kv_cache)


async def test_a_log_of_another_version_ends_its_request_and_not_the_worker(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        await gateway.broker.create_groups()
        request_id = await gateway.submit((1, 2))
        await gateway.client.xadd(KEYS.output(request_id), {"item": b"\x93\x02\x00\x00"}, id="0-1")
        async with serving(redis_url):
            assert (await gateway.result(await gateway.submit((3, 4))))[1] in ("stop", "length")
            async with asyncio.timeout(60):
                while not gateway.items.get(request_id):
                    await gateway.listen()
        assert [item.outcome.name for item in gateway.items[request_id] if item.outcome] == ["error"]
        await assert_drained(gateway, 2)


async def test_a_dead_engine_ends_the_worker_and_the_next_one_goes_on(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        await gateway.broker.create_groups()
        request_id = await gateway.submit((4, 2))
        engine = Engine(Deadly(), LIMITS, (EOS,), None)
        service = WorkerService(EngineRuntime(engine), model_name=MODEL, worker_id="w1", redis_url=redis_url)
        with pytest.raises(EngineDied, match="the library aborted"):
            await service.run(0.0)
        async with serving(redis_url):
            assert (await gateway.result(request_id))[0] == continuation((4, 2), 8)


class LostDevice(Runner):
    def execute(self, step):  # type: ignore[no-untyped-def]
        raise RuntimeError("an illegal memory access was encountered")

    def check(self) -> None:
        raise RuntimeError("the device is lost")


async def test_a_lost_device_ends_the_worker_and_its_requests_go_on_in_the_next_one(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        await gateway.broker.create_groups()
        request_id = await gateway.submit((4, 2))
        engine = Engine(MockModel(), LIMITS, (EOS,), None, runner=LostDevice)
        service = WorkerService(EngineRuntime(engine), model_name=MODEL, worker_id="w1", redis_url=redis_url)
        with pytest.raises(EngineDied, match="the device is lost"):
            await service.run(0.0)
        assert not await gateway.broker.read_output(request_id)
        async with serving(redis_url):
            assert await gateway.result(request_id) == (continuation((4, 2), 8), "length")
        await assert_drained(gateway, 1)


@pytest.mark.slow
async def test_a_redis_that_came_back_older_is_given_the_request_again(redis_url: str) -> None:
    """The state from before the claim returns: the attempt is over, and the same worker claims the request again."""
    async with Gateway(redis_url) as gateway, serving(redis_url, Slow()):
        request_id = await gateway.submit((4, 2), max_tokens=20, ignore_eos=True)
        await gateway.listen()
        async with gateway.client.pipeline(transaction=True) as pipe:
            pipe.delete(KEYS.output(request_id))
            pipe.hset(KEYS.request(request_id), mapping={"emitted": 0, "state": "queued"})
            pipe.hdel(KEYS.request(request_id), "attempt", "owner")
            pipe.hincrby(KEYS.load, "requests", 1)
            await pipe.execute()
        async with asyncio.timeout(60):
            while not any(item.outcome for item in gateway.items[request_id]):
                await gateway.listen()
        log = await gateway.broker.read_output(request_id)
        tokens = [token for item in log for delta in item.deltas for token in delta.token_ids]
        alone = Engine(MockModel(), LIMITS, (EOS,), None)
        assert [[tokens]] == generate(alone, [(4, 2)], SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0))


ANSWER_S = 0.1


@pytest.mark.parametrize(("deaths", "state"), [(0, b"done"), (2, b"queued")])
async def test_what_was_being_taken_over_ends_or_is_handed_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, deaths: int, state: bytes
) -> None:
    """Redis answers the claim only after the worker has read for the last time."""
    asked, answer = asyncio.Event(), asyncio.Event()
    claim: Any = Broker.claim
    run: Any = Consumer.run

    async def late(*args: Any) -> Claim | None:
        found: Claim | None = await claim(*args)
        asked.set()
        await answer.wait()
        return found

    async def run_to_the_end(consumer: Consumer) -> None:
        await run(consumer)
        asyncio.get_running_loop().call_later(ANSWER_S, answer.set)

    async with Gateway(redis_url) as gateway:
        await gateway.broker.create_groups()
        request_id = await gateway.submit((3, 4))
        [delivery] = await QueueReader(gateway.client, MODEL, "dead").read(1, 0)
        for index in range(deaths):
            await gateway.broker.claim(delivery, "dead", new_id(), f"process {index}")
        monkeypatch.setattr(Broker, "claim", late)
        monkeypatch.setattr(Consumer, "run", run_to_the_end)
        engine = Engine(MockModel(), LIMITS, (EOS,), None)
        leases = LeaseTimes(lease_s=0.2)
        service = WorkerService(
            EngineRuntime(engine), model_name=MODEL, worker_id="w1", redis_url=redis_url, leases=leases
        )
        task = asyncio.create_task(service.run(5.0))
        await asyncio.wait_for(asked.wait(), 60)
        service.stop()
        await asyncio.wait_for(task, 60)
        assert await gateway.client.hget(KEYS.request(request_id), "state") == state


async def test_a_worker_parks_what_still_runs_if_it_is_asked_to(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        model = MockModel()
        forward = model.forward

        def slow(*arguments: Any) -> torch.Tensor:
            time.sleep(0.01)
            return forward(*arguments)

        model.forward = slow  # type: ignore[method-assign]
        engine = Engine(model, LIMITS, (EOS,), None)
        service = WorkerService(EngineRuntime(engine), model_name=MODEL, worker_id="w1", redis_url=redis_url)
        task = asyncio.create_task(service.run(0.05, park_s=500))
        request_id = await gateway.submit((3, 4), max_tokens=120, ignore_eos=True)
        await gateway.listen()
        service.stop()
        await asyncio.wait_for(task, 60)
        assert await gateway.client.hget(KEYS.request(request_id), "state") == b"parked"
        [parked] = await gateway.broker.read_parked(5)
        assert 0 < parked.emitted < 120
        assert 490 < parked.left_s <= 500
        engine.check_integrity()
