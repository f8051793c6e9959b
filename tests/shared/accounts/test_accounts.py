"""Accounts: secrets, limits, charges, the store, usage and the backup."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from quire.shared.accounts.account import MAX_ACCOUNT_BYTES, Account, check_name
from quire.shared.accounts.backup import DAY_MS, back_up, restore
from quire.shared.accounts.limits import AccountLimits, money, nanos
from quire.shared.accounts.secret import PREFIX, digest_of, key_id_of, new_secret
from quire.shared.accounts.store import AccountStore, AuditEntry, UnknownAccount
from quire.shared.accounts.usage import DAY_S, UsageRow, as_csv, read_usage
from quire.shared.config.validators import InvalidValue
from quire.shared.protocol.keys import ACCOUNTS_TAG, AccountKeys
from quire.shared.redis.clients import command_client
from tests.support.redis_server import RedisServer

# --- account ----------------------------------------------------------------------------------------------------------
# Accounts as JSON: an account equals its copy that is written and read, and corrupt data is refused.


TEXTS, TIMES = ("name", "parent", "digest", "old_digest"), ("created", "expires", "revoked", "old_until")
KEY = Account(kind="key", id="0" * 16, name="ci", parent="acme/web", created=5, digest="a" * 64, expires=100)


def says_why(error: InvalidValue) -> bool:
    """Return whether an error has a sentence behind the name of the value."""
    return len(str(error).removeprefix(error.name).split()) > 1


def test_an_account_is_read_as_it_was_written() -> None:
    for account in (
        KEY,
        Account(kind="project", id="acme/web", name="web", parent="acme", limits=AccountLimits(max_tokens=5)),
        Account(kind="organisation", id="acme", name="acme"),
    ):
        assert Account.decode(account.place, account.encode()) == account
    assert KEY.parent_place == "project:acme/web"
    assert Account(kind="project", id="acme/web", name="web", parent="acme").parent_place == "organisation:acme"


def test_an_account_is_shown_without_its_digests() -> None:
    """And with null in place of a time that never comes."""
    limits = AccountLimits(cost_per_day=5 * 10**8)
    both = {"created": 5, "limits": {"cost_per_day": 0.5}}
    key = replace(KEY, limits=limits, old_digest="b" * 64)
    about = {"object": "key", "id": "0" * 16, "name": "ci", "organisation": "acme", "project": "web"}
    assert key.shown() == about | both | {"expires": 100, "revoked": None}
    assert replace(key, expires=0, revoked=9).shown() == about | both | {"expires": None, "revoked": 9}
    project = Account(kind="project", id="acme/web", name="web", parent="acme", created=5, limits=limits)
    assert project.shown() == both | {"object": "project", "id": "acme/web", "name": "web", "organisation": "acme"}
    organisation = Account(kind="organisation", id="acme", name="acme", created=5, limits=limits)
    assert organisation.shown() == both | {"object": "organisation", "id": "acme", "name": "acme"}
    assert not any(digest in repr(key) for digest in (key.digest, key.old_digest))


@pytest.mark.parametrize(
    ("place", "data", "wrong"),
    [
        ("user:x", '{"limits": {}}', "account"),
        ("key:" + "0" * 16, "{", "account"),
        ("key:" + "0" * 16, "[]", "account"),
        ("key:" + "0" * 16, '{"name": "a"}', "account"),
        ("key:" + "0" * 16, '{"name": "a", "limits": {}, "is_admin": true}', "account"),
        *[("key:" + "0" * 16, f'{{"{name}": 1, "limits": {{}}}}', name) for name in TEXTS],
        *[("key:" + "0" * 16, f'{{"{name}": "1", "limits": {{}}}}', name) for name in TIMES],
        ("key:" + "0" * 16, '{"name": "a", "limits": {"max_tokens": -1}}', "max_tokens"),
        *[("key:" + "0" * 16, f'{{"name": "a", "limits": {{}}, "{one}": "x"}}', "digest") for one in TEXTS[2:]],
        ("key:x", '{"name": "a", "limits": {}}', "id"),
        ("organisation:acme", '{"name": "' + "a" * 70_000 + '", "limits": {}}', "account"),
        ("organisation:acme", "[" * 60_000, "account"),
    ],
)
def test_corrupt_accounts_are_refused(place: str, data: str, wrong: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Account.decode(place, data)
    assert caught.value.name == wrong
    assert says_why(caught.value)


def test_an_account_of_the_largest_size_is_read() -> None:
    account = Account(kind="organisation", id="acme", name="acme")
    data = account.encode().ljust(MAX_ACCOUNT_BYTES)
    assert Account.decode(account.place, data) == account
    with pytest.raises(InvalidValue, match="too long"):
        Account.decode(account.place, data + " ")


def test_only_the_digests_of_a_key_that_is_valid_now_are_accepted() -> None:
    """The old digest is accepted until its time is over, and neither once the key is revoked."""
    key = replace(KEY, old_digest="c" * 64, old_until=70)
    found = {
        (digest[:1], now): key.fault(digest, now)
        for digest in ("a" * 64, "b" * 64, "c" * 64, "")
        for now in (50, 69, 70, 99, 100)
    }
    assert {place for place, fault in found.items() if not fault} == {
        *(("a", now) for now in (50, 69, 70, 99)),
        *(("c", now) for now in (50, 69)),
    }
    assert {fault for (digest, _), fault in found.items() if digest in ("b", "")} == {"unknown"}
    assert (found["a", 100], found["c", 70]) == ("expired", "unknown")
    assert replace(key, expires=0).fault("a" * 64, 10**12) == ""
    revoked = replace(key, revoked=40)
    assert [revoked.fault(digest, 50) for digest in ("a" * 64, "b" * 64, "c" * 64)] == ["revoked", "unknown", "revoked"]


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "../a", "x" * 65, 5])
def test_names_with_other_characters_are_refused(name: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        check_name("project", name)
    assert caught.value.name == "project"


# --- secret -----------------------------------------------------------------------------------------------------------
# Secrets have an id that is found again, and digests that do not show them.


def test_the_id_of_a_secret_is_found_again() -> None:
    key_id, secret = new_secret()
    assert key_id_of(secret) == key_id
    assert secret.startswith(PREFIX + key_id)
    same, other = new_secret(key_id)
    assert (same, other != secret) == (key_id, True)
    assert digest_of(secret) != digest_of(other)
    assert len(digest_of(secret)) == 64


@pytest.mark.parametrize("text", ["", "sk-quire-", "sk-other", "x" * 10_000, PREFIX + "0" * 16 + "-" + "ä" * 43])
def test_other_texts_are_no_secrets(text: str) -> None:
    assert key_id_of(text) == ""


# --- limits -----------------------------------------------------------------------------------------------------------
# Limits are read strictly, and money without rounding.


def test_limits_are_written_as_they_are_read() -> None:
    given = {"models": ["a"], "tokens_per_minute": 5, "cost_per_day": 0.25}
    limits = AccountLimits.of(given)
    assert limits.cost_per_day == 250_000_000
    assert limits.shown() == given
    assert AccountLimits.stored(limits.given()) == limits
    assert AccountLimits().given() == {}


@pytest.mark.parametrize(
    "given",
    [
        {"unknown": 1},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"requests_per_minute": 1.5},
        {"priority": "highest"},
        {"models": "a"},
        {"models": [""]},
        {"cost_per_day": float("nan")},
        {"cost_per_day": "1e99999999"},
        {"cost_per_month": -1},
        {"tokens_per_day": 10**16},
        {"weight": 1001},
        {"weight": -1},
        {"weight": 2.5},
        {"x" * 100: 1},
    ],
)
def test_wrong_limits_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        AccountLimits.of(given)
    assert caught.value.name == next(iter(given))[:80]
    assert says_why(caught.value)


def test_money_is_exact() -> None:
    assert nanos("x", "0.000000001") == 1
    assert nanos("x", 0.1) == 10**8
    assert money(10**8) == 0.1
    with pytest.raises(InvalidValue):
        nanos("x", "0.0000000001")


# --- store ------------------------------------------------------------------------------------------------------------
# Changes of accounts in a real Redis: atomic, and each with an entry of the audit log.


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[AccountStore]:
    client = command_client(redis_url, ACCOUNTS_TAG)
    yield AccountStore(client, "tester")
    await client.aclose()


async def test_a_key_is_made_with_its_project_and_organisation(store: AccountStore) -> None:
    assert not await store.has_keys()
    before = int(await store.now())
    key, secret = await store.create("acme", "web", "ci", AccountLimits(max_tokens=5), expires=9)
    assert await store.has_keys()
    chain = await store.chain(key.id)
    assert key_id_of(secret) == key.id
    assert before <= key.created <= await store.now()
    assert chain == (
        Account(
            kind="key", id=key.id, name="ci", parent="acme/web", created=key.created,
            limits=AccountLimits(max_tokens=5), digest=digest_of(secret), expires=9,
        ),
        Account(kind="project", id="acme/web", name="web", parent="acme", created=key.created),
        Account(kind="organisation", id="acme", name="acme", created=key.created),
    )  # fmt: skip
    assert key == chain[0]
    # A second key changes nothing of the accounts above.
    await store.limit("project:acme/web", AccountLimits(max_tokens=7))
    other, _ = await store.create("acme", "web", "cd", AccountLimits())
    assert (await store.chain(other.id))[1].limits.max_tokens == 7
    assert await store.chain("0" * 16) == ()
    for names, wrong in ((("../x", "web", "ci"), "organisation"), (("acme", "../x", "ci"), "project"),
                         (("acme", "web", "../x"), "name")):  # fmt: skip
        with pytest.raises(InvalidValue) as caught:
            await store.create(*names, AccountLimits())
        assert caught.value.name == wrong
    assert len(await store.all()) == 4


async def test_accounts_are_listed_the_oldest_first(store: AccountStore) -> None:
    for name, created in (("b", 5), ("a", 7), ("c", 5)):
        account = Account(kind="organisation", id=name, name=name, created=created)
        await store.client.hset(store.keys.accounts, account.place, account.encode())
    assert [one.id for one in await store.all()] == ["b", "c", "a"]


@pytest.mark.parametrize("grace_s", [0, 60])
async def test_the_secret_before_a_rotation_is_valid_for_its_grace(store: AccountStore, grace_s: int) -> None:
    key, secret = await store.create("acme", "web", "ci", AccountLimits())
    before = await store.now()
    rotated, new = await store.rotate(key.id, grace_s)
    after = await store.now()
    assert key_id_of(new) == key.id
    assert rotated == await store.get(key.place)
    assert rotated.fault(digest_of(new), after + 10**9) == ""
    found = [rotated.fault(digest_of(secret), now) for now in (before, before + 58, after + 61)]
    assert found == (["", "", "unknown"] if grace_s else ["unknown"] * 3)
    assert await store.expiry(0) == 0
    assert int(after) + 5 <= await store.expiry(5) <= await store.now() + 5


async def test_the_audit_log_has_every_change_and_no_secret(store: AccountStore) -> None:
    before = await store.now()
    key, secret = await store.create("acme", "web", "ci", AccountLimits(max_tokens=5), expires=9)
    await store.limit("project:acme/web", AccountLimits(max_tokens=7))
    _, other = await store.rotate(key.id, 60)
    await store.revoke(key.id)
    entries = await store.audit()
    assert [(entry.action, entry.accounts, json.loads(entry.change)) for entry in entries] == [
        ("revoke", key.place, {}),
        ("rotate", key.place, {"grace_s": 60}),
        ("limit", "project:acme/web", {"limits": {"max_tokens": 7}}),
        (
            "create",
            f"organisation:acme project:acme/web {key.place}",
            {"name": "ci", "limits": {"max_tokens": 5}, "expires": 9},
        ),
    ]
    assert {entry.actor for entry in entries} == {"tester"}
    after = await store.now()
    assert all(1000 * before - 1 <= entry.at_ms <= 1000 * after for entry in entries)
    assert all(part not in str(entries) for part in (secret, other, digest_of(secret), digest_of(other)))
    assert await store.audit(count=2) == entries[:2]
    # Whatever else is in the log hides no other entry.
    for surprise in ({"at": "x"}, {"surprise": b"\xff"}):
        await store.client.xadd(store.keys.audit, dict(surprise))
    assert await store.audit() == [AuditEntry(0, "", "", "", ""), AuditEntry(0, "", "", "", ""), *entries]


async def test_changes_at_the_same_time_are_all_kept(store: AccountStore) -> None:
    key, _ = await store.create("acme", "web", "ci", AccountLimits())
    await asyncio.gather(store.revoke(key.id), *(store.limit(key.place, AccountLimits(max_tokens=n)) for n in (1, 2)))
    found = await store.get(key.place)
    assert found.revoked
    assert found.limits.max_tokens in (1, 2)


async def test_unknown_and_corrupt_accounts(store: AccountStore) -> None:
    for unknown in (store.revoke("0" * 16), store.rotate("0" * 16), store.get("key:" + "0" * 16)):
        with pytest.raises(UnknownAccount, match="0" * 16):
            await unknown
    key, _ = await store.create("acme", "web", "ci", AccountLimits())
    client: Any = store.client
    await client.hset(store.keys.accounts, "project:acme/web", "x")
    with pytest.raises(InvalidValue):
        await store.chain(key.id)
    assert [one.kind for one in await store.all()] == ["key", "organisation"]


async def test_a_revoked_key_is_not_rotated(store: AccountStore) -> None:
    key, _ = await store.create("acme", "web", "ci", AccountLimits())
    assert key.fault(key.digest, await store.now()) == ""
    revoked = await store.revoke(key.id)
    assert revoked == await store.get(key.place)
    assert revoked.fault(key.digest, await store.now()) == "revoked"
    assert 0 <= await store.now() - revoked.revoked < 60
    with pytest.raises(InvalidValue) as caught:
        await store.rotate(key.id)
    assert caught.value.name == "id"
    assert says_why(caught.value)


async def test_only_projects_have_a_weight(store: AccountStore) -> None:
    await store.create("acme", "web", "ci", AccountLimits())
    assert (await store.limit("project:acme/web", AccountLimits(weight=1000))).limits.weight == 1000
    [key] = [account for account in await store.all() if account.kind == "key"]
    for place in (key.place, "organisation:acme"):
        with pytest.raises(InvalidValue, match="must be set for a project") as caught:
            await store.limit(place, AccountLimits(weight=5))
        assert caught.value.name == "weight"
    with pytest.raises(InvalidValue) as caught:
        await store.create("acme", "web", "other", AccountLimits(weight=5))
    assert caught.value.name == "weight"
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


# --- usage ------------------------------------------------------------------------------------------------------------
# Usage is read by day, key and model, and written as CSV.


async def test_usage_is_read_by_day_key_and_model(redis_url: str) -> None:
    client, keys = command_client(redis_url, ACCOUNTS_TAG), AccountKeys()
    today = int(time.time()) // DAY_S
    counts = {"k m x requests": 2, "k m x prompt": 5, "j m x cost": 10**9, "odd": 1}
    await client.hset(keys.usage(today), mapping=counts)
    await client.hset(keys.usage(today - 1), mapping={"k m x completion": 7})
    await client.hset(keys.usage(today - 2), mapping={"k m x completion": 9})
    rows = await read_usage(client, keys.prefix, 2)
    assert [(row.key, row.model, row.requests, row.prompt, row.completion, row.cost) for row in rows] == [
        ("k", "m x", 0, 0, 7, 0),
        ("j", "m x", 0, 0, 0, 10**9),
        ("k", "m x", 2, 5, 0, 0),
    ]
    assert len(await read_usage(client, keys.prefix, 3, "k")) == 3
    await client.aclose()


def test_no_name_in_the_csv_is_a_formula() -> None:
    text = as_csv([UsageRow("2026-01-02", "k", "=1+1", 1, 2, 3, 5 * 10**8)])
    assert text.splitlines()[1] == "2026-01-02,k,'=1+1,1,2,3,0.5,0"


# --- backup -----------------------------------------------------------------------------------------------------------
# A backup of the accounts is restored into an empty Redis, with everything that was spent.


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
    with pytest.raises(InvalidValue, match="where no account was ever made") as caught:
        await restore(client, saved, "tester")
    assert caught.value.name == "file"
    assert await back_up(client) == saved
    # Also where only the log is left.
    await client.delete(KEYS.accounts)
    with pytest.raises(InvalidValue, match="where no account was ever made"):
        await restore(client, saved, "tester")
    assert not await store.has_keys()


@pytest.mark.parametrize("key", [KEYS.accounts, KEYS.audit])
async def test_accounts_that_another_command_makes_meanwhile_are_not_overwritten(
    client: Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    exists = Pipeline.exists

    async def late(pipe: Pipeline, *names: str) -> int:
        found = await exists(pipe, *names)
        with redis_server.client() as other:
            other.hset(key, "x", "y") if key == KEYS.accounts else other.xadd(key, {"x": "y"})
        return found

    monkeypatch.setattr(Pipeline, "exists", late)
    saved = {"format": 1, "accounts": {KEY.place: KEY.encode()}, "audit": [], "usage": {"5": {"a b prompt": 1}}}
    with pytest.raises(InvalidValue) as caught:
        await restore(client, saved, "tester")
    assert caught.value.name == "file"
    assert await client.keys() == [key.encode()]


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
    with pytest.raises(InvalidValue, match="backup") as caught:
        await restore(client, {**good, **damage} if damage else damage, "tester")
    assert caught.value.name == "file"
    assert await client.dbsize() == 0
