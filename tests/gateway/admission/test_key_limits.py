"""Limits of keys over HTTP, with a real Redis: refusals, headers, and counts that equal the generated tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.gateway.admission import reached_limits
from quire.gateway.admission.key_limits import duration, read_prices
from quire.gateway.api.labels import user_hash
from quire.shared.accounts.charge import Price
from quire.shared.accounts.limits import AccountLimits
from quire.shared.errors import StartError
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, raw_request, tokens, until

ANSWER = tokens("abc")
# Tokens of the prompt "Hello".
PROMPT = 3


async def key_of(gateway: RunningGateway, **limits: Any) -> dict[str, str]:
    account, secret = await gateway.gateway.process.key_ring.store.create(
        "acme", "web", "test", AccountLimits.of(limits)
    )
    return {"Authorization": f"Bearer {secret}", "place": account.place}


async def complete(gateway: RunningGateway, key: dict[str, str], **parameters: Any) -> Reply:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 10, **parameters}
    return await gateway.post("/v1/completions", body, Authorization=key["Authorization"])


async def spent(gateway: RunningGateway, key: dict[str, str]) -> dict[str, int]:
    store = gateway.gateway.process.key_ring.store
    found: Any = await store.client.hgetall(store.keys.spent(key["place"]))
    return {name.decode(): int(value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("organisation", "organisation:acme"), ("project", "project:acme/web"), ("key", None), ("all", "")],
)
async def test_the_scope_of_the_prefix_cache_is_an_account(
    start_gateway: Start, scope: str, expected: str | None
) -> None:
    gateway = await start_gateway(prefix_cache_scope=scope)
    key = await key_of(gateway)
    async with gateway.worker(emit(ANSWER)) as worker:
        assert (await complete(gateway, key, cache_salt="s")).status == 200
        assert (
            await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 1})
        ).status == 200
    claimed = [(request.cache_salt, request.cache_scope) for request in worker.claimed]
    assert claimed == [("s", key["place"] if expected is None else expected), ("", "")]


async def test_calls_per_minute_are_refused_with_the_time_to_wait(start_gateway: Start) -> None:
    gateway = await start_gateway()
    key = await key_of(gateway, requests_per_minute=2)
    async with gateway.worker(emit(ANSWER)):
        replies = [await complete(gateway, key) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies[:2]] == ["1", "0"]
    assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
    assert replies[0].headers["x-ratelimit-reset-requests"].endswith("s")
    assert replies[2].error["code"] == "rate_limit_exceeded"
    # The bucket gets one call in 30 s.
    assert 29_000 < int(replies[2].headers["retry-after-ms"]) <= 30_000
    assert replies[2].headers["retry-after"] == "30"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"]
)
async def test_a_call_over_the_limit_of_calls_is_refused_before_its_body_is_read(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(reached_limits, "MEMORY_S", 60.0)  # a slow machine forgets nothing meanwhile
    gateway = await start_gateway(body_timeout_s=0.2)
    key = await key_of(gateway, requests_per_minute=1)
    unread = raw_request("POST", path, headers={**key, "Content-Length": "4000000"})
    body, repeated = {"model": MODEL, "prompt": "Hello", "max_tokens": 10}, {**key, "Idempotency-Key": "one"}
    async with gateway.worker(emit(ANSWER)):
        assert (await gateway.send(unread)).status == 408
        accepted = await gateway.post("/v1/completions", body, **repeated)
        assert (accepted.status, (await complete(gateway, key)).status) == (200, 429)
        # The key may repeat the call that was accepted, and count tokens.
        assert (await gateway.post("/v1/completions", body, **repeated)).json["id"] == accepted.json["id"]
        assert (await gateway.post("/tokenize", {"model": MODEL, "prompt": "Hello"}, **key)).status == 200
        assert (await complete(gateway, key)).status == 429
        refused = await gateway.send(unread)
        assert refused.status == 429
        assert 55_000 < int(refused.headers["retry-after-ms"]) <= 60_000
        # A new limit holds at once at the gateway through which it was set.
        process = gateway.gateway.process
        await process.key_ring.store.limit(key["place"], AccountLimits.of({"requests_per_minute": 100_000}))
        process.key_ring.forget()
        assert (await complete(gateway, key)).status == 200


async def test_tokens_are_reserved_and_settled(start_gateway: Start) -> None:
    gateway = await start_gateway()
    key = await key_of(gateway, tokens_per_day=40)
    async with gateway.worker(emit(ANSWER)):
        first = await complete(gateway, key)
        usage = first.json["usage"]["total_tokens"]
        assert (await spent(gateway, key))["day_tokens"] == usage == PROMPT + len(ANSWER)
        # Most of the budget is free again, because the reservation was larger than the use.
        assert (await complete(gateway, key)).status == 200
        refused = await complete(gateway, key, max_tokens=40)
    assert (refused.status, refused.error["code"]) == (402, "insufficient_quota")
    assert (await spent(gateway, key))["day_tokens"] == 2 * usage
    assert (await spent(gateway, key))["open"] == 0


async def test_a_call_that_waits_holds_its_reservation_until_it_is_cancelled(start_gateway: Start) -> None:
    gateway = await start_gateway()
    key = await key_of(gateway, concurrent_requests=1)
    waiting = asyncio.create_task(complete(gateway, key))
    await until(lambda: _is(gateway, key, "open", 1))
    refused = await complete(gateway, key)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert "concurrent_requests" in refused.error["message"]
    waiting.cancel()
    await until(lambda: _is(gateway, key, "open", 0))
    assert (await spent(gateway, key))["day_tokens"] == 0


async def _is(gateway: RunningGateway, key: dict[str, str], name: str, value: int) -> bool:
    return (await spent(gateway, key)).get(name) == value


async def test_a_project_limits_all_of_its_keys(start_gateway: Start) -> None:
    gateway = await start_gateway()
    keys = [await key_of(gateway) for _ in range(2)]
    await gateway.gateway.process.key_ring.store.limit("project:acme/web", AccountLimits.of({"requests_per_minute": 1}))
    async with gateway.worker(emit(ANSWER)):
        assert [(await complete(gateway, key)).status for key in keys] == [200, 429]


async def test_all_prompts_of_a_call_are_one_call_and_are_reserved_together(start_gateway: Start) -> None:
    gateway = await start_gateway()
    key = await key_of(gateway, requests_per_minute=3, tokens_per_day=60)
    async with gateway.worker(emit(ANSWER)):
        assert (await complete(gateway, key, prompt=["Hello", "Hello"])).status == 200
        assert (await spent(gateway, key))["day_tokens"] == 2 * (PROMPT + len(ANSWER))
        reply = await complete(gateway, key, prompt=["Hello"] * 4)
        assert reply.status == 402
        await until(lambda: _is(gateway, key, "open", 0))
    # The bucket of 60,000ths has two calls less, apart from the moments that passed.
    assert 60_000 <= (await spent(gateway, key))["calls"] < 75_000


async def test_costs_are_counted_at_the_prices_of_the_model(start_gateway: Start) -> None:
    gateway = await start_gateway(prices=f"{MODEL}=0.5:2")
    key = await key_of(gateway, cost_per_day=0.00005)
    async with gateway.worker(emit(ANSWER)):
        assert (await complete(gateway, key)).status == 200
        assert (await spent(gateway, key))["day_cost"] == PROMPT * 500 + len(ANSWER) * 2000
        assert (await complete(gateway, key, max_tokens=30)).status == 402
    unpriced = await start_gateway()
    assert (await complete(unpriced, key)).error["code"] == "permission_denied"


async def test_models_classes_and_max_tokens_of_a_key(start_gateway: Start) -> None:
    gateway = await start_gateway()
    other = await key_of(gateway, models=["another"])
    assert (await complete(gateway, other)).error["code"] == "model_not_found"
    listed = await gateway.send(_get("/v1/models", other))
    assert listed.json["data"] == []
    assert (await gateway.send(_get(f"/v1/models/{MODEL}", other))).status == 404
    small = await key_of(gateway, max_tokens=2, priority="standard")
    assert (await complete(gateway, small, max_tokens=3)).error["param"] == "max_tokens"
    assert (await complete(gateway, small, max_tokens=2, priority="interactive")).error["code"] == "permission_denied"
    batch = await key_of(gateway, priority="batch")
    async with gateway.worker(emit(ANSWER)) as worker:
        assert (await complete(gateway, small, max_tokens=None)).status == 200
        assert worker.claimed[-1].sampling.max_tokens == 2
        assert (await complete(gateway, batch)).status == 200
    waiting = asyncio.create_task(complete(gateway, batch))
    await until(lambda: _is(gateway, batch, "open", 1))
    client: Any = gateway.gateway.broker.client
    assert await client.hget(gateway.gateway.broker.keys.load, "requests:batch") == b"1"
    waiting.cancel()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"priority": "interactive"}, "priority"),
        ({"priority": -3}, "priority"),
        ({"service_tier": "priority"}, "service_tier"),
    ],
)
async def test_a_class_above_standard_needs_a_grant(start_gateway: Start, given: dict[str, object], param: str) -> None:
    gateway = await start_gateway()
    store = gateway.gateway.process.key_ring.store
    key, granted = await key_of(gateway), await key_of(gateway, priority="interactive")
    refused = await complete(gateway, key, **given)
    assert (refused.status, refused.error["code"], refused.error["param"]) == (403, "permission_denied", param)
    assert "the class standard at most" in refused.error["message"]
    assert "limit `priority` of the key" in refused.error["message"]
    async with gateway.worker(emit(ANSWER)):
        assert (await complete(gateway, granted, **given)).status == 200
        for allowed in ({}, {"priority": "standard"}, {"priority": "batch"}, {"service_tier": "auto"}):
            assert (await complete(gateway, key, **allowed)).status == 200
        # Without a key all classes are allowed.
        assert (await gateway.post("/v1/completions", {"model": MODEL, "prompt": "Hello", **given})).status == 200
        # The project of the key may have the grant, and each account may have less.
        await store.limit("project:acme/web", AccountLimits(priority="interactive"))
        gateway.gateway.process.key_ring.forget()
        assert (await complete(gateway, key, **given)).status == 200
        await store.limit("organisation:acme", AccountLimits(priority="standard"))
        gateway.gateway.process.key_ring.forget()
        assert (await complete(gateway, granted, **given)).status == 403


async def test_a_call_counts_for_the_project_of_its_key_and_for_its_user(start_gateway: Start) -> None:
    gateway = await start_gateway(user_hash_key="k")
    store = gateway.gateway.process.key_ring.store
    key, other = await key_of(gateway), await key_of(gateway)
    await store.limit("project:acme/web", AccountLimits(weight=250))
    gateway.gateway.process.key_ring.forget()
    keys, client = gateway.gateway.broker.keys, gateway.gateway.broker.client
    hashed = user_hash("ann@example.com", b"k")

    async def waits(count: int) -> bool:
        return await gateway.gateway.broker.queued() == (count, count * (PROMPT + 10))

    calls = []
    for count, (headers, user) in enumerate(((key, "ann@example.com"), (other, ""), ({"Authorization": ""}, "")), 1):
        calls.append(asyncio.create_task(complete(gateway, headers, **({"user": user} if user else {}))))
        await until(lambda count=count: waits(count))
    found = {
        tuple(map(bytes.decode, await client.hmget(name, "tenant", "user")))
        async for name in client.scan_iter(keys.request("*"))
    }
    assert found == {
        ("standard 250 acme/web", f"{PROMPT} {hashed}"),
        ("standard 250 acme/web", f"{PROMPT} "),
        ("standard 100 anonymous", f"{PROMPT} "),
    }
    names = [name.decode() async for name in client.scan_iter("*")]
    assert keys.line("standard", "acme/web", hashed) in names
    assert not any("ann@" in name for name in names)
    async with gateway.worker(emit(ANSWER)):
        assert [(await call).status for call in calls] == [200, 200, 200]
    assert await client.exists(keys.waiting) == 0


def _get(path: str, key: dict[str, str]) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: test\r\nAuthorization: {key['Authorization']}\r\n\r\n".encode()


def test_prices_are_read_exactly() -> None:
    assert read_prices("a=0.5:2, b=c=1.005:0") == {"a": Price(500, 2000), "b=c": Price(1005, 0)}
    for wrong in ("a", "a=1", "a=1:2:3", "=1:2", "a=-1:2", "a=0.0001:1", "a=nan:1", "a=1e9:1"):
        with pytest.raises(StartError, match="--prices"):
            read_prices(wrong)


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0ms"), (20, "20ms"), (1500, "1.5s"), (60_000, "1m"), (62_000, "1m2s"), (90_500, "1m30.5s")]
)
def test_durations_have_openais_form(ms: int, text: str) -> None:
    assert duration(ms) == text
