"""Limits of keys: how they are read, charged, and told in errors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.admission import retry
from quire.gateway.admission.retry import AccountRetry
from quire.gateway.api.labels import user_hash
from quire.gateway.errors.api_errors import ApiKeyWrong, BrokerDown
from quire.gateway.features.keys import key_ring, reached_limits
from quire.gateway.features.keys.key_limits import duration, read_prices
from quire.gateway.features.keys.limit_errors import error_of
from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.secret import digest_of, new_secret
from quire.shared.config.validators import InvalidValue
from quire.shared.process.errors import StartError
from quire.shared.protocol.charge import LimitReached, Price
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, raw_request, tokens, until

# --- Limits of keys over HTTP, with a real Redis: refusals, headers, and counts that equal the generated tokens -------


ANSWER = tokens("abc")
# Tokens of the prompt "Hello".
PROMPT = 3


async def key_of(gateway: RunningGateway, **limits: Any) -> dict[str, str]:
    account, secret = await gateway.gateway.process.keys.ring.store.create(
        "acme", "web", "test", AccountLimits.of(limits)
    )
    return {"Authorization": f"Bearer {secret}", "place": account.place}


async def complete(gateway: RunningGateway, key: dict[str, str], **parameters: Any) -> Reply:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 10, **parameters}
    return await gateway.post("/v1/completions", body, Authorization=key["Authorization"])


async def spent(gateway: RunningGateway, key: dict[str, str]) -> dict[str, int]:
    store = gateway.gateway.process.keys.ring.store
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
        await process.keys.ring.store.limit(key["place"], AccountLimits.of({"requests_per_minute": 100_000}))
        process.keys.ring.forget()
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
    await gateway.gateway.process.keys.ring.store.limit(
        "project:acme/web", AccountLimits.of({"requests_per_minute": 1})
    )
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
    store = gateway.gateway.process.keys.ring.store
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
        gateway.gateway.process.keys.ring.forget()
        assert (await complete(gateway, key, **given)).status == 200
        await store.limit("organisation:acme", AccountLimits(priority="standard"))
        gateway.gateway.process.keys.ring.forget()
        assert (await complete(gateway, granted, **given)).status == 403


async def test_a_call_counts_for_the_project_of_its_key_and_for_its_user(start_gateway: Start) -> None:
    gateway = await start_gateway(user_hash_key="k")
    store = gateway.gateway.process.keys.ring.store
    key, other = await key_of(gateway), await key_of(gateway)
    await store.limit("project:acme/web", AccountLimits(weight=250))
    gateway.gateway.process.keys.ring.forget()
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


# --- Accounts are remembered for a second, in bounded memory ----------------------------------------------------------


KEY_ID, SECRET = new_secret()


class Store:
    """Counts the reads of accounts."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.fault: Exception | None = None
        self.ahead_s = 0.0

    async def now(self) -> float:
        return time.time() + self.ahead_s

    async def chain(self, key_id: str, known: tuple[Account, ...] = ()) -> tuple[Account, ...]:
        assert {account.id for account in known} <= {key_id}
        self.reads.append(key_id)
        if self.fault:
            raise self.fault
        return (Account(kind="key", id=KEY_ID, name="a", digest=digest_of(SECRET)),) if key_id == KEY_ID else ()


async def key_retry(command: Any) -> Any:
    return await command()


def ring() -> tuple[key_ring.KeyRing, Store]:
    store: Any = Store()
    return key_ring.KeyRing(store, key_retry), store


async def test_an_account_is_read_once_while_it_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, store = ring()
    for _ in range(3):
        assert (await keys.caller(SECRET)).owner == KEY_ID
    assert len(store.reads) == 1
    keys.forget()
    await keys.caller(SECRET)
    monkeypatch.setattr(key_ring, "FRESH_S", 0.0)
    await keys.caller(SECRET)
    assert len(store.reads) == 3


async def test_unknown_keys_are_bounded_and_other_texts_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_ring, "MAX_KEYS", 5)
    keys, store = ring()
    secrets = [new_secret()[1] for _ in range(20)]
    for secret in (*secrets, *secrets[-5:], "sk-quire-nothing"):
        with pytest.raises(ApiKeyWrong):
            await keys.caller(secret)
    assert len(store.reads) == 20
    with pytest.raises(ApiKeyWrong):
        await keys.caller(secrets[-6])
    assert len(store.reads) == 21


async def test_a_corrupt_account_is_refused() -> None:
    keys, store = ring()
    store.fault = InvalidValue("limits", "is corrupt")
    with pytest.raises(ApiKeyWrong):
        await keys.caller(SECRET)


async def test_the_owner_of_work_that_goes_on_is_found_without_its_secret() -> None:
    keys, store = ring()
    assert (await keys.owner(KEY_ID)).owner == KEY_ID
    assert (await keys.owner("")).owner == ""
    assert store.reads == [KEY_ID]
    with pytest.raises(ApiKeyWrong, match="expired or was revoked"):
        await keys.owner("0" * 16)


async def test_a_key_expires_by_the_time_of_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, store = ring()
    expires = int(time.time()) + 86_400
    account = Account(kind="key", id=KEY_ID, name="a", digest=digest_of(SECRET), expires=expires)

    async def chain(key_id: str, known: tuple[Account, ...] = ()) -> tuple[Account, ...]:
        return (account,)

    monkeypatch.setattr(store, "chain", chain)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock of this process is wrong
    store.ahead_s = expires - 10.0
    assert (await keys.caller(SECRET)).owner == KEY_ID
    store.ahead_s = expires + 10.0
    keys.forget()
    for found in (keys.caller(SECRET), keys.owner(KEY_ID)):
        with pytest.raises(ApiKeyWrong, match="has expired"):
            await found


@pytest.mark.parametrize("change", [{"revoked": 1}, {"expires": 1}])
async def test_work_of_a_key_that_is_gone_ends(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    keys, store = ring()
    account = Account(kind="key", id=KEY_ID, name="a", digest=digest_of(SECRET), **change)

    async def chain(key_id: str, known: tuple[Account, ...] = ()) -> tuple[Account, ...]:
        return (account,)

    monkeypatch.setattr(store, "chain", chain)
    with pytest.raises(ApiKeyWrong, match=f"The API key {KEY_ID} has expired or was revoked"):
        await keys.owner(KEY_ID)


# --- Retries of commands about API keys: a lasting outage is waited for once, and later commands are refused ----------


class Command:
    """Fails while `is_down`. attempts: how often it was sent."""

    def __init__(self) -> None:
        self.is_down = True
        self.attempts = 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.is_down:
            raise RedisConnectionError("refused")
        return "answer"


async def test_after_an_outage_commands_are_refused_at_once_until_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.1)
    accounts, command = AccountRetry(), Command()
    with pytest.raises(BrokerDown):
        await accounts(command)
    assert command.attempts > 1
    command.attempts = 0
    with pytest.raises(BrokerDown):
        await accounts(command)
    assert command.attempts == 1
    command.is_down = False
    assert await accounts(command) == "answer"
    assert accounts.ready.is_set()
    # The next outage is waited for again.
    command.is_down, command.attempts = True, 0
    asyncio.get_running_loop().call_later(0.03, lambda: setattr(command, "is_down", False))
    assert await accounts(command) == "answer"
    assert command.attempts > 1


async def test_a_change_is_sent_once() -> None:
    accounts, command = AccountRetry(), Command()
    with pytest.raises(BrokerDown):
        await accounts.once(command())
    assert command.attempts == 1


# --- The errors of limits say when to try again -----------------------------------------------------------------------


def test_a_call_that_can_never_fit_is_not_to_be_repeated() -> None:
    error = error_of(LimitReached("tokens_per_minute", "key:a", -1))
    assert (error.status, error.headers) == (429, {"X-Should-Retry": "false"})
    assert error_of(LimitReached("tokens_per_minute", "key:a", 1001)).headers["Retry-After"] == "2"
