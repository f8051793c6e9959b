"""Accounts are remembered for a second, in bounded memory."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire.gateway.admission import key_ring
from quire.gateway.errors.api_errors import ApiKeyWrong
from quire.shared.accounts.account import Account
from quire.shared.accounts.secret import digest_of, new_secret
from quire.shared.validators import InvalidValue

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


async def retry(command: Any) -> Any:
    return await command()


def ring() -> tuple[key_ring.KeyRing, Store]:
    store: Any = Store()
    return key_ring.KeyRing(store, retry), store


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
    for _ in range(20):
        with pytest.raises(ApiKeyWrong):
            await keys.caller(new_secret()[1])
    assert len(keys._known) == 5
    with pytest.raises(ApiKeyWrong):
        await keys.caller("sk-quire-nothing")
    assert len(store.reads) == 20


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
