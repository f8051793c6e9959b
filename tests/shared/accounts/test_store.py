"""Changes of accounts in a real Redis: atomic, and each with an entry of the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.secret import digest_of
from quire.shared.accounts.store import AccountStore, UnknownAccount
from quire.shared.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client
from quire.shared.validators import InvalidValue


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[AccountStore]:
    client = command_client(redis_url, ACCOUNTS_TAG)
    yield AccountStore(client, "tester")
    await client.aclose()


async def test_a_key_is_made_with_its_project_and_organisation(store: AccountStore) -> None:
    assert not await store.has_keys()
    key, secret = await store.create("acme", "web", "ci", AccountLimits(max_tokens=5), expires=9)
    assert await store.has_keys()
    assert [one.place for one in await store.chain(key.id)] == [key.place, "project:acme/web", "organisation:acme"]
    assert key.digest == digest_of(secret)
    assert await store.chain("0" * 16) == ()
    with pytest.raises(InvalidValue):
        await store.create("acme", "../x", "ci", AccountLimits())


async def test_the_audit_log_has_every_change_and_no_secret(store: AccountStore) -> None:
    key, secret = await store.create("acme", "web", "ci", AccountLimits())
    await store.limit("project:acme/web", AccountLimits(max_tokens=7))
    _, other = await store.rotate(key.id, 60)
    await store.revoke(key.id)
    entries = await store.audit()
    assert [entry.action for entry in entries] == ["revoke", "rotate", "limit", "create"]
    assert {entry.actor for entry in entries} == {"tester"}
    assert entries[2].change == '{"limits": {"max_tokens": 7}}'
    assert all(part not in str(entries) for part in (secret, other, digest_of(secret), digest_of(other)))


async def test_changes_at_the_same_time_are_all_kept(store: AccountStore) -> None:
    key, _ = await store.create("acme", "web", "ci", AccountLimits())
    await asyncio.gather(store.revoke(key.id), *(store.limit(key.place, AccountLimits(max_tokens=n)) for n in (1, 2)))
    found = await store.get(key.place)
    assert found.revoked
    assert found.limits.max_tokens in (1, 2)


async def test_unknown_and_corrupt_accounts(store: AccountStore) -> None:
    with pytest.raises(UnknownAccount):
        await store.revoke("0" * 16)
    key, _ = await store.create("acme", "web", "ci", AccountLimits())
    client: Any = store.client
    await client.hset(store.keys.accounts, "project:acme/web", "x")
    with pytest.raises(InvalidValue):
        await store.chain(key.id)
    assert [one.kind for one in await store.all()] == ["key", "organisation"]


async def test_a_revoked_key_is_not_rotated(store: AccountStore) -> None:
    key, _ = await store.create("acme", "web", "ci", AccountLimits())
    await store.revoke(key.id)
    with pytest.raises(InvalidValue):
        await store.rotate(key.id)


async def test_only_projects_have_a_weight(store: AccountStore) -> None:
    await store.create("acme", "web", "ci", AccountLimits())
    assert (await store.limit("project:acme/web", AccountLimits(weight=1000))).limits.weight == 1000
    [key] = [account for account in await store.all() if account.kind == "key"]
    for place in (key.place, "organisation:acme"):
        with pytest.raises(InvalidValue, match="must be set for a project") as caught:
            await store.limit(place, AccountLimits(weight=5))
        assert caught.value.name == "weight"
    with pytest.raises(InvalidValue):
        await store.create("acme", "web", "other", AccountLimits(weight=5))
    assert len([account for account in await store.all() if account.kind == "key"]) == 1


async def test_known_accounts_are_read_at_once(store: AccountStore, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = await store.create("acme", "web", "ci", AccountLimits())
    known = await store.chain(key.id)
    await store.limit("project:acme/web", AccountLimits(weight=7))
    with monkeypatch.context() as patch:
        patch.setattr(store.client, "hget", None)
        changed = await store.chain(key.id, known)
    assert [account.place for account in changed] == [key.place, "project:acme/web", "organisation:acme"]
    assert [account.limits.weight for account in changed] == [0, 7, 0]
    await store.client.hdel(store.keys.accounts, key.place)
    assert await store.chain(key.id, known) == ()
