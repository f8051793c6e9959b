"""The accounts in Redis: reads them, and changes them together with the audit log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis

from quire.shared.accounts.account import Account, check_name
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.secret import digest_of, new_secret
from quire.shared.config.validators import InvalidValue
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.broker.scripts import load_script
from quire.shared.protocol.keys import AccountKeys
from quire.shared.redis.clock import unix_time

# Changes that are made again because another caller changed the same account meanwhile.
ATTEMPTS = 10


class UnknownAccount(Exception):
    """There is no account with this id. The text is the id."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change of accounts. at_ms: unix milliseconds of Redis. accounts: fields of those that changed."""

    at_ms: int
    actor: str
    action: str
    accounts: str
    change: str


class AccountStore:
    """All accounts of one Redis. Raises redis-py's RedisError when Redis fails.

    client: made for the lane ACCOUNTS_TAG. actor: the name of the caller in the audit log.
    """

    def __init__(self, client: Redis, actor: str) -> None:
        self.client = client
        self.keys = AccountKeys()
        self.actor = actor
        self._change = load_script(client, "change_account")

    async def now(self) -> float:
        """Return the unix time of Redis, by which keys expire."""
        return await unix_time(self.client)

    async def expiry(self, life_s: int) -> int:
        """Return the unix time after which a new key is not valid; 0 (never) for a life of 0 seconds."""
        return int(await self.now()) + life_s if life_s else 0

    async def has_keys(self) -> bool:
        """Return whether an API key was ever made."""
        return bool(await self.client.hlen(self.keys.accounts))

    async def chain(self, key_id: str, known: tuple[Account, ...] = ()) -> tuple[Account, ...]:
        """Return a key, its project and its organisation; empty if there is no such key. Raise InvalidValue.

        known: what an earlier call returned. A key stays in its project, so all accounts are read at once.
        """
        if known:
            places = [account.place for account in known]
            stored: Any = await self.client.hmget(self.keys.accounts, places)
            if None not in stored:
                return tuple(Account.decode(place, text(data)) for place, data in zip(places, stored, strict=True))
        accounts: list[Account] = []
        place = f"key:{key_id}"
        while place:
            data = await self.client.hget(self.keys.accounts, place)
            if data is None:
                return ()
            accounts.append(Account.decode(place, text(data)))
            place = accounts[-1].parent_place
        return tuple(accounts)

    async def all(self) -> list[Account]:
        """Return all accounts, the oldest first; unreadable accounts are left out."""
        accounts = []
        for place, data in (await self.client.hgetall(self.keys.accounts)).items():
            try:
                accounts.append(Account.decode(text(place), text(data)))
            except InvalidValue:
                continue
        return sorted(accounts, key=lambda account: (account.created, account.place))

    async def get(self, place: str) -> Account:
        """Return the account in the field `<kind>:<id>`. Raise UnknownAccount and InvalidValue."""
        data = await self.client.hget(self.keys.accounts, place)
        if data is None:
            raise UnknownAccount(place.partition(":")[2])
        return Account.decode(place, text(data))

    async def create(
        self, organisation: str, project: str, name: str, limits: AccountLimits, expires: int = 0
    ) -> tuple[Account, str]:
        """Make an API key, and its project and organisation if they are new. Return the key and its secret.

        Raise InvalidValue for a wrong name, and for a weight.
        """
        _check_weight("key", limits)
        parent = f"{check_name('organisation', organisation)}/{check_name('project', project)}"
        now = int(await self.now())
        key_id, secret = new_secret()
        key = Account(
            kind="key",
            id=key_id,
            name=check_name("name", name),
            parent=parent,
            created=now,
            limits=limits,
            digest=digest_of(secret),
            expires=expires,
        )
        above = (
            Account(kind="organisation", id=organisation, name=organisation, created=now),
            Account(kind="project", id=parent, name=project, parent=organisation, created=now),
        )
        for _ in range(ATTEMPTS):
            new = [account for account in above if not await self.client.hexists(self.keys.accounts, account.place)]
            changes = [("", account) for account in (*new, key)]
            if await self._write("create", {"name": name, "limits": limits.shown(), "expires": expires}, changes):
                return key, secret
        raise TimeoutError("the accounts change all the time")

    async def limit(self, place: str, limits: AccountLimits) -> Account:
        """Replace the limits of an account. Raise UnknownAccount and InvalidValue."""
        _check_weight(place.partition(":")[0], limits)
        return await self._update("limit", place, {"limits": limits.shown()}, limits=limits)

    async def revoke(self, key_id: str) -> Account:
        """Make a key invalid; this cannot be undone. Raise UnknownAccount and InvalidValue."""
        return await self._update("revoke", f"key:{key_id}", {}, revoked=int(await self.now()))

    async def rotate(self, key_id: str, grace_s: int = 0) -> tuple[Account, str]:
        """Give a key a new secret, and return both. The old secret stays valid for `grace_s` seconds."""
        old = await self.get(f"key:{key_id}")
        if old.revoked:
            raise InvalidValue("id", "must be that of a key that is not revoked")
        _, secret = new_secret(key_id)
        until = await self.expiry(grace_s)
        old_digest = old.digest if grace_s else ""
        changes: dict[str, Any] = {"digest": digest_of(secret), "old_digest": old_digest, "old_until": until}
        return await self._update("rotate", old.place, {"grace_s": grace_s}, **changes), secret

    async def audit(self, count: int = 100) -> list[AuditEntry]:
        """Return the newest changes, the newest first."""
        entries: Any = await self.client.xrevrange(self.keys.audit, count=count)
        changes = []
        for _, data in entries:
            fields = {text(name): text(value) for name, value in data.items()}
            at = fields.get("at", "")
            names = ("actor", "action", "accounts", "change")
            changes.append(AuditEntry(int(at) if at.isdecimal() else 0, *(fields.get(name, "") for name in names)))
        return changes

    async def _update(self, action: str, place: str, shown: dict[str, Any], **values: Any) -> Account:
        for _ in range(ATTEMPTS):
            data = await self.client.hget(self.keys.accounts, place)
            if data is None:
                raise UnknownAccount(place.partition(":")[2])
            account = replace(Account.decode(place, text(data)), **values)
            if await self._write(action, shown, [(text(data), account)]):
                return account
        raise TimeoutError("the account changes all the time")

    async def _write(self, action: str, shown: dict[str, Any], changes: Sequence[tuple[str, Account]]) -> bool:
        parts = [part for before, account in changes for part in (account.place, before, account.encode())]
        args = [self.actor, action, json.dumps(shown), *parts]
        return bool(await self._change(keys=[self.keys.accounts, self.keys.audit], args=args))


def _check_weight(kind: str, limits: AccountLimits) -> None:
    """Raise InvalidValue for a weight of an account that is not a project."""
    if limits.weight and kind != "project":
        raise InvalidValue("weight", "must be set for a project: keys and organisations have none")
