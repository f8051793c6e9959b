"""Parking at a gateway: the sweep, and the budgets of API keys, with a real Redis."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.admission import parking
from quire.shared.accounts.limits import AccountLimits
from quire.shared.broker import Broker
from quire.shared.messages import Delta, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, raw_request, tokens, until

RESPONSES = "/v1/responses"
ANSWER = tokens("a whole answer of this worker")
# Tokens of the prompt "Hello" in a completion.
PROMPT = 3


async def send(gateway: RunningGateway, method: str, path: str, key: str, body: Any = None) -> Reply:
    data = json.dumps(body).encode() if body is not None else b""
    return await gateway.send(raw_request(method, path, data, {"Authorization": f"Bearer {key}"}))


async def make_key(gateway: RunningGateway, **limits: Any) -> tuple[str, str]:
    """Return the id and the secret of a new key."""
    store = gateway.gateway.process.key_ring.store
    account, secret = await store.create("acme", "web", "test", AccountLimits.of(limits))
    return account.id, secret


async def spent(gateway: RunningGateway, key_id: str) -> dict[str, int]:
    raw: Any = await gateway.gateway.broker.client.hgetall(f"quire:{{accounts}}:spent:key:{key_id}")
    return {name.decode(): int(float(value)) for name, value in raw.items()}


async def background(gateway: RunningGateway, key: str, **parameters: Any) -> Reply:
    body = {"model": MODEL, "input": "Hello", "background": True, **parameters}
    return await send(gateway, "POST", RESPONSES, key, body)


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
        store = gateway.gateway.process.key_ring.store
        await store.limit(f"key:{key_id}", AccountLimits(tokens_per_day=1000))
        gateway.gateway.process.key_ring.forget()
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
