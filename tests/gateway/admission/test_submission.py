"""Submission: retries without Redis, cancellation, parking, and what a gateway knows of workers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.admission.canceller import Canceller
from quire.gateway.admission.service_rate import ServiceRate
from quire.gateway.admission.worker_registry import usable_adapters
from quire.gateway.features.parking import service as parking
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.broker import Admission, Broker, QueueBounds
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from quire.shared.redis.clients import command_client
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, raw_request, tokens, until
from tests.support.redis_server import RedisServer, running_redis

# --- Submissions: a full queue, and replies of Redis that are lost ----------------------------------------------------


async def queued(gateway: RunningGateway, count: int) -> None:
    async def reached() -> bool:
        return await gateway.queued() == count

    await until(reached)


async def test_the_bound_on_tokens_counts_what_requests_may_use(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_tokens=300)
    waiting = asyncio.create_task(gateway.complete(max_tokens=200))
    await queued(gateway, 1)
    assert (await gateway.complete(max_tokens=200)).status == 429
    waiting.cancel()


async def test_a_submission_whose_reply_was_lost_is_made_again_and_accepted_once(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.exceptions import ConnectionError as RedisConnectionError

    broker = gateway.gateway.broker
    real, calls = broker.submit, []

    async def unlucky(*arguments: Any, **options: Any) -> str:
        first: str = await real(*arguments, **options)
        calls.append(arguments[0])
        if len(calls) < 3:
            raise RedisConnectionError("the reply was lost")
        return first

    monkeypatch.setattr(broker, "submit", unlucky)
    async with gateway.worker(emit(tokens("a"))) as worker:
        assert (await gateway.chat()).status == 200
    assert len(calls) == 3
    assert len(worker.claimed) == 1
    assert await gateway.accepted() == 1


# --- Retries: a short outage of Redis delays a call, a long outage answers it with 503 --------------------------------


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis server that the test may stop."""
    with running_redis("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.mark.slow
async def test_without_redis_new_calls_get_503_and_later_ones_are_served_again(
    own_redis: RedisServer, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(redis_url=own_redis.url)
    own_redis.kill()

    async def unready() -> bool:
        reply = await gateway.get("/readyz")
        return reply.status == 503 and "Redis does not answer" in reply.json["problems"]

    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "broker_unavailable")
    assert int(reply.headers["retry-after"]) >= 1
    await until(unready)
    assert (await gateway.get("/healthz")).status == 200
    # A later call fails at once: an earlier call has already waited for Redis in vain. Calls wait for longer than this
    # test may take, from the loss of the connection on.
    monkeypatch.setattr("quire.gateway.admission.retry.RETRY_S", 3600)
    gateway.gateway.subscription.lost_at -= 3600
    assert (await gateway.chat()).status == 503
    assert (await gateway.post(f"/v1/completions/cmpl-{'0' * 32}/cancel", b"")).status == 503
    own_redis.start()
    await asyncio.wait_for(gateway.gateway.subscription.ready.wait(), 60)
    async with gateway.worker(emit(tokens("a"))):
        assert (await gateway.chat()).status == 200


async def test_a_redis_that_is_soon_back_costs_new_calls_a_wait_and_no_error(
    own_redis: RedisServer, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.gateway.admission.retry.RETRY_S", 60.0)  # longer than any start of Redis takes
    gateway = await start_gateway(redis_url=own_redis.url)
    own_redis.kill()
    first = asyncio.create_task(gateway.chat())

    async def lost() -> bool:
        return not gateway.gateway.subscription.ready.is_set()

    await until(lost)
    ready, waiting = gateway.gateway.subscription.ready, 0
    wait = ready.wait

    async def counted() -> bool:
        nonlocal waiting
        waiting += 1
        return await wait()

    async def three_wait() -> bool:
        return waiting == 3

    monkeypatch.setattr(ready, "wait", counted)
    calls = [first, *(asyncio.create_task(gateway.chat()) for _ in range(3))]
    await until(three_wait)
    assert not any(call.done() for call in calls)
    own_redis.start()
    async with gateway.worker(emit(tokens("a"))):
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 4


# --- The canceller cancels a request without listeners, and keeps a request that still has a listener -----------------


KEYS = LaneKeys("lane")
BOUNDS = QueueBounds(requests=10, tokens=100)


@asynccontextmanager
async def lane(redis_url: str) -> AsyncIterator[Broker]:
    client = command_client(redis_url)
    try:
        yield Broker(client, "lane")
    finally:
        await client.aclose()


async def test_who_leaves_while_an_earlier_cancellation_is_under_way_is_not_forgotten(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lane(redis_url) as broker:
        for name in ("wanted", "slow"):
            await broker.submit(name, b"", Admission(gateway="g", cost=1, bounds=BOUNDS))
        listening = {"wanted"}
        asked, answer = asyncio.Event(), asyncio.Event()
        detach: Any = broker.detach

        async def slowly(request_id: str, gateway_id: str) -> list[str]:
            asked.set()
            await answer.wait()
            found: list[str] = await detach(request_id, gateway_id)
            return found

        monkeypatch.setattr(broker, "detach", slowly)
        canceller = Canceller(broker, "g", listening.__contains__)
        canceller.cancel(["wanted", "slow"])
        await asked.wait()
        listening.clear()
        canceller.cancel(["wanted"])
        answer.set()
        await canceller.close(10)
        for name in ("wanted", "slow"):
            assert await broker.client.hget(KEYS.request(name), "outcome") == b"cancelled"


@pytest.mark.slow
async def test_who_came_with_the_same_key_has_the_answer_though_the_first_call_was_given_up(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gateway never receives the reply to its submission; the client repeats the call at another gateway."""
    here, there = await start_gateway(), await start_gateway()
    submitted, cut = asyncio.Event(), asyncio.Event()
    submit: Any = here.gateway.broker.submit

    async def unheard(*args: Any, **options: Any) -> None:
        await submit(*args, **options)
        submitted.set()
        await cut.wait()
        raise RedisConnectionError("the reply is lost")

    monkeypatch.setattr("quire.gateway.admission.retry.RETRY_S", 0.2)
    monkeypatch.setattr(here.gateway.broker, "submit", unheard)
    may_emit = asyncio.Event()

    async def later(request: GenerationRequest) -> Steps:
        await may_emit.wait()
        async for step in emit(tokens("The quick brown fox"))(request):
            yield step

    async def attached() -> bool:
        keys = there.gateway.broker.keys
        [request] = await there.gateway.broker.client.keys(keys.request("*"))
        return bool(await there.gateway.broker.client.hget(request, "gateway") == there.gateway.id.encode())

    body = {"model": MODEL, "prompt": "Hello"}
    async with there.worker(later):
        first = asyncio.create_task(here.post("/v1/completions", body, Idempotency_Key="key"))
        await submitted.wait()
        second = asyncio.create_task(there.post("/v1/completions", body, Idempotency_Key="key"))
        await until(attached)
        cut.set()
        assert (await first).status == 503
        await here.cancellations()
        may_emit.set()
        reply = await second
    assert reply.status == 200, reply.body
    assert reply.json["choices"][0]["text"] == "The quick brown fox"


async def test_what_cannot_be_cancelled_in_time_is_counted(
    redis_url: str, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancellation that Redis has received and not answered counts too."""
    async with lane(redis_url) as broker:
        canceller = Canceller(broker, "g", lambda _: False)
        with redis_server.stopped():
            canceller.cancel([str(index) for index in range(20)])
            await canceller.close(0.1)
    assert "20 requests could not be cancelled" in caplog.text


# --- Parking at a gateway: the sweep, and the budgets of API keys, with a real Redis ----------------------------------


RESPONSES = "/v1/responses"
ANSWER = tokens("a whole answer of this worker")
# Tokens of the prompt "Hello" in a completion.
PROMPT = 3


async def send(gateway: RunningGateway, method: str, path: str, key: str, body: Any = None) -> Reply:
    data = json.dumps(body).encode() if body is not None else b""
    return await gateway.send(raw_request(method, path, data, {"Authorization": f"Bearer {key}"}))


async def make_key(gateway: RunningGateway, **limits: Any) -> tuple[str, str]:
    """Return the id and the secret of a new key."""
    store = gateway.gateway.process.keys.ring.store
    account, secret = await store.create("acme", "web", "test", AccountLimits.of(limits))
    return account.id, secret


async def spent(gateway: RunningGateway, key_id: str) -> dict[str, int]:
    raw: Any = await gateway.gateway.broker.client.hgetall(f"quire:{{accounts}}:spent:key:{key_id}")
    return {name.decode(): int(float(value)) for name, value in raw.items()}


async def background(gateway: RunningGateway, key: str, **parameters: Any) -> Reply:
    body = {"model": MODEL, "input": "Hello", "background": True, **parameters}
    return await send(gateway, "POST", RESPONSES, key, body)


@pytest.mark.slow
async def test_the_sweep_ends_what_was_parked_for_too_long_and_survives_redis(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(parking, "LOOK_S", 0.05)
    real, failures = Broker.lapsed, []

    async def unlucky(self: Broker, count: int = 100) -> list[str]:
        if not failures:
            failures.append(1)
            raise RedisConnectionError("gone")
        return await real(self, count)

    monkeypatch.setattr(Broker, "lapsed", unlucky)
    gateway = await start_gateway(parking_retention_s=1)
    broker = gateway.gateway.broker
    made = await gateway.post(RESPONSES, {"model": MODEL, "input": "Hello", "background": True})
    await gateway.post(f"{RESPONSES}/{made.json['id']}/park", b"")

    async def has_ended() -> bool:
        return (await broker.read_totals()).get("deadline") == 1

    await until(has_ended)
    assert await broker.parked_ids() == []
    assert failures
    assert "was parked for too long and has ended" in caplog.text


async def test_a_parked_request_holds_no_reservation_and_no_place(start_gateway: Start) -> None:
    gateway = await start_gateway()
    key_id, key = await make_key(gateway, concurrent_requests=1, tokens_per_day=1000)
    first = await background(gateway, key, max_output_tokens=50)
    assert (await background(gateway, key, max_output_tokens=50)).status == 429
    before = await spent(gateway, key_id)
    assert before["day_tokens"] > 50
    await send(gateway, "POST", f"{RESPONSES}/{first.json['id']}/park", key)
    parked = await spent(gateway, key_id)
    assert (parked["open"], parked["day_tokens"]) == (0, 0)
    second = await background(gateway, key, max_output_tokens=50)
    assert second.status == 200
    refused = await send(gateway, "POST", f"{RESPONSES}/{first.json['id']}/unpark", key)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert await gateway.gateway.broker.parked_ids() != []
    await send(gateway, "POST", f"{RESPONSES}/{second.json['id']}/cancel", key)
    unparked = await send(gateway, "POST", f"{RESPONSES}/{first.json['id']}/unpark", key)
    assert unparked.json["parked"] is False
    after = await spent(gateway, key_id)
    assert (after["open"], after["day_tokens"]) == (1, before["day_tokens"])


async def test_a_full_queue_refuses_to_unpark(start_gateway: Start) -> None:
    gateway = await start_gateway(max_queued_requests=1)
    made = await gateway.post(RESPONSES, {"model": MODEL, "input": "Hello", "background": True})
    await gateway.post(f"{RESPONSES}/{made.json['id']}/park", b"")
    await gateway.post(RESPONSES, {"model": MODEL, "input": "Hello", "background": True})
    refused = await gateway.post(f"{RESPONSES}/{made.json['id']}/unpark", b"")
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert "retry-after" in refused.headers


async def test_an_answer_beyond_the_budget_is_parked_at_its_last_token(start_gateway: Start) -> None:
    """The budget is never exceeded, and a larger one lets the answer go on."""
    gateway = await start_gateway(park_on_budget=True)
    key_id, key = await make_key(gateway, tokens_per_day=PROMPT + 10)
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": len(ANSWER), "ignore_eos": True}
    broker = gateway.gateway.broker
    emitted: dict[str, int] = {}

    async def script(request: Any) -> Any:
        for index in range(emitted.get(request.id, 0), len(ANSWER)):
            last = index == len(ANSWER) - 1
            yield (Delta(0, (ANSWER[index],), "length" if last else None),), Outcome("length") if last else None

    async with gateway.worker(script):
        parked = await send(gateway, "POST", "/v1/completions", key, body)
        assert (parked.status, parked.error["code"]) == (409, "parked")
        [call_id] = await broker.parked_ids()
        assert int(await broker.client.hget(broker.keys.request(call_id), "emitted") or 0) == 10
        assert (await spent(gateway, key_id))["day_tokens"] == PROMPT + 10
        name = f"/v1/completions/cmpl-{call_id}"
        refused = await send(gateway, "POST", f"{name}/unpark", key)
        assert (refused.status, refused.error["code"]) == (402, "insufficient_quota")
        store = gateway.gateway.process.keys.ring.store
        await store.limit(f"key:{key_id}", AccountLimits(tokens_per_day=1000))
        gateway.gateway.process.keys.ring.forget()
        emitted[call_id] = 10
        assert (await send(gateway, "POST", f"{name}/unpark", key)).status == 200

        async def has_ended() -> bool:
            return await broker.client.hget(broker.keys.request(call_id), "state") == b"done"

        await until(has_ended)
    assert (await spent(gateway, key_id))["day_tokens"] == PROMPT + len(ANSWER)
    usage = (await send(gateway, "GET", "/v1/usage", key)).json["data"]
    assert [(row["requests"], row["prompt_tokens"], row["completion_tokens"]) for row in usage] == [
        (1, PROMPT, len(ANSWER))
    ]


async def test_without_the_setting_such_a_call_is_refused(start_gateway: Start) -> None:
    gateway = await start_gateway()
    _, key = await make_key(gateway, tokens_per_day=PROMPT + 10)
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 20}
    async with gateway.worker(emit(ANSWER)):
        assert (await send(gateway, "POST", "/v1/completions", key, body)).status == 402
    _, poor = await make_key(gateway, tokens_per_day=PROMPT)
    assert (await send(await start_gateway(park_on_budget=True), "POST", "/v1/completions", poor, body)).status == 402


# --- The registry of workers: readiness, limits and the lease of the gateway ------------------------------------------


async def test_ready_means_that_a_worker_makes_progress(gateway: RunningGateway) -> None:
    reply = await gateway.get("/readyz")
    assert (reply.status, reply.json) == (
        503,
        {"ready": False, "workers": 0, "problems": ["no worker makes progress"]},
    )
    async with gateway.worker(emit(tokens("a"))) as worker:
        await gateway.gateway.worker_registry.refresh()
        reply = await gateway.get("/readyz")
        assert (reply.status, reply.json) == (200, {"ready": True, "workers": 1, "problems": []})
        await worker.broker.retire(worker.worker_id, worker.worker_id)
    await gateway.gateway.worker_registry.refresh()
    assert (await gateway.get("/readyz")).status == 503


async def test_the_smallest_context_among_model_and_workers_counts(gateway: RunningGateway) -> None:
    async with (
        gateway.worker(emit(tokens("a")), max_model_len=100),
        gateway.worker(emit(tokens("a")), max_model_len=50, vocab_size=300),
    ):
        await gateway.gateway.worker_registry.refresh()
        reply = await gateway.complete(prompt=[65] * 5, max_tokens=60)
        assert "maximum context length is 50 tokens" in reply.error["message"]
        assert (await gateway.complete(prompt=[300])).error["param"] == "prompt[0]"
        assert (await gateway.get("/v1/models")).json["data"][0]["max_model_len"] == 50


async def test_a_context_may_be_set_smaller_but_not_larger(start_gateway: Start) -> None:
    small, large = await start_gateway(max_model_len=10), await start_gateway(max_model_len=10_000)
    assert (small.gateway.limits.max_model_len, large.gateway.limits.max_model_len) == (10, 512)


async def test_the_lease_of_the_gateway_is_there_while_it_runs(start_gateway: Start) -> None:
    gateway = await start_gateway(gateway_id="g7")
    broker = gateway.gateway.broker
    assert await broker.client.ttl(broker.keys.gateway_lease("g7")) > 0


@pytest.mark.parametrize(
    ("held", "announced", "usable"),
    [
        ([["a@1", "b@2"], ["a@1", "b@2"]], [], {"a": "1", "b": "2"}),
        ([["a@1"], []], [], {}),
        ([["a@1"], []], ["a"], {"a": "1"}),
        ([["a@1"], ["a@2"]], ["a"], {}),
        ([[], []], ["a"], {}),
        ([], ["a"], {}),
    ],
)
def test_calls_may_name_adapters_that_every_worker_can_run(
    held: list[list[str]], announced: list[str], usable: dict[str, str]
) -> None:
    cards: list[Any] = [SimpleNamespace(adapters=tuple(one)) for one in held]
    assert usable_adapters(cards, announced) == usable


# --- Retry-After from what the whole lane did in the last half minute -------------------------------------------------


def rate(*samples: tuple[float, int]) -> ServiceRate:
    found = ServiceRate()
    for now, ended in samples:
        found.sample(now, {"accepted": 10**6, "stop": ended - ended // 2, "length": ended // 2})
    return found


@pytest.mark.parametrize(
    ("samples", "waiting", "expected"),
    [
        ([], 100, 5),
        ([(0, 7)], 100, 5),
        ([(0, 0), (10, 100)], 1000, 10),
        ([(0, 0), (10, 100)], 3, 1),
        ([(0, 0), (1, 1)], 10_000, 60),
        ([(0, 5), (30, 5)], 10, 30),
        ([(0, 0), (10, 900), (40, 960)], 100, 5),
        ([(0, 0), (0.5, 1000), (10, 100)], 1000, 10),
        ([(0, 1000), (10, 0), (20, 20)], 100, 5),
    ],
    ids=[
        "nothing is known",
        "one sample is no rate",
        "a tenth of the queue at ten per second",
        "never less than a second",
        "never more than a minute",
        "nothing has ended",
        "what is older than the window does not count",
        "samples that come too fast are left out",
        "redis came back empty",
    ],
)
def test_retry_after(samples: list[tuple[float, int]], waiting: int, expected: int) -> None:
    assert rate(*samples).retry_after_s(waiting) == expected
