"""A backup of the accounts is restored into an empty Redis, with everything that was spent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from quire.shared.accounts.backup import DAY_MS, back_up, restore
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.keys import ACCOUNTS_TAG, AccountKeys
from quire.shared.redis.clients import command_client
from quire.shared.validators import InvalidValue

KEYS = AccountKeys()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = command_client(redis_url, ACCOUNTS_TAG)
    yield client
    await client.aclose()


async def today_of(client: Redis) -> int:
    seconds, _ = await client.time()
    return seconds * 1000 // DAY_MS


async def spent_of(client: Redis, place: str) -> dict[str, int]:
    fields: Any = await client.hgetall(KEYS.spent(place))
    return {name.decode(): int(value) for name, value in fields.items()}


async def test_keys_limits_audit_and_usage_come_back(client: Redis) -> None:
    store = AccountStore(client, "tester")
    key, _ = await store.create("acme", "web", "ci", AccountLimits(tokens_per_day=100))
    other, _ = await store.create("acme", "batch", "ci", AccountLimits())
    await store.revoke(other.id)
    today = await today_of(client)
    await client.hset(KEYS.usage(today), mapping={f"{key.id} m x prompt": 5, f"{key.id} m x completion": 7})
    await client.hset(KEYS.usage(today), mapping={f"{other.id} m cost": 9, f"{other.id} m requests": 3})
    await client.hset(KEYS.usage(today - 31), mapping={f"{key.id} m prompt": 1000})
    saved = json.loads(json.dumps(await back_up(client)))
    accounts, audit = await store.all(), await store.audit()

    await client.flushall()
    assert await restore(client, saved, "tester") == 2
    assert await store.all() == accounts
    restored = await store.audit()
    assert restored[1:] == audit
    assert (restored[0].action, restored[0].actor) == ("restore", "tester")
    assert (await back_up(client))["usage"] == saved["usage"]
    assert 0 < await client.ttl(KEYS.usage(today - 31)) < await client.ttl(KEYS.usage(today))
    for place in (key.place, "project:acme/web"):
        spent = await spent_of(client, place)
        assert (spent["day"], spent["day_tokens"], spent["month_tokens"]) == (today, 12, 12)
    spent = await spent_of(client, "organisation:acme")
    assert (spent["day_tokens"], spent["day_cost"], spent["month_cost"]) == (12, 9, 9)


async def test_accounts_that_exist_are_never_overwritten(client: Redis) -> None:
    store = AccountStore(client, "tester")
    await store.create("acme", "web", "ci", AccountLimits())
    saved = await back_up(client)
    with pytest.raises(InvalidValue, match="where no account was ever made"):
        await restore(client, saved, "tester")
    assert await back_up(client) == saved


@pytest.mark.parametrize(
    "damage",
    [
        [],
        {"format": 2},
        {"accounts": {"key:x": "{}"}},
        {"accounts": {"project:a/b": 5}},
        {"audit": [5]},
        {"usage": {"today": {}}},
        {"usage": {"5": {"a b prompt": "many"}}},
    ],
)
async def test_a_damaged_backup_changes_nothing(client: Redis, damage: Any) -> None:
    good = {"format": 1, "accounts": {}, "audit": [], "usage": {}}
    with pytest.raises(InvalidValue, match="backup"):
        await restore(client, {**good, **damage} if damage else damage, "tester")
    assert await client.dbsize() == 0
