"""Backup and restore of the accounts: the only data in Redis that must outlive it.

A backup is JSON: all accounts (API keys with the digests of their secrets), the audit log, and the usage of each day.
A restore computes the spending of today and of this month from the usage. A backup of a running system is therefore
exact: the reservations of requests that have not ended are not in it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import WatchError

from quire.shared.accounts.account import Account
from quire.shared.accounts.usage import AMOUNTS, DAY_S, MAX_DAYS
from quire.shared.config.validators import InvalidValue
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.keys import USAGE_S, AccountKeys

FORMAT = 1
DAY_MS = DAY_S * 1000


async def back_up(client: Redis) -> dict[str, Any]:
    """Return the accounts, the audit log and the usage as they are at one moment, as values of JSON.

    client: made for the lane ACCOUNTS_TAG. Raise redis-py's RedisError.
    """
    keys = AccountKeys()
    today = await _now_ms(client) // DAY_MS
    days = range(today - MAX_DAYS, today + 1)
    pipe = client.pipeline(transaction=True)
    pipe.hgetall(keys.accounts)
    pipe.xrange(keys.audit)
    for day in days:
        pipe.hgetall(keys.usage(day))
    accounts, audit, *usage = await pipe.execute()
    return {
        "format": FORMAT,
        "accounts": _texts(accounts),
        "audit": [[text(entry), _texts(fields)] for entry, fields in audit],
        "usage": {str(day): _texts(amounts) for day, amounts in zip(days, usage, strict=True) if amounts},
    }


async def restore(client: Redis, saved: Any, actor: str) -> int:
    """Write a backup into a Redis without accounts, and return the number of API keys in it.

    Raise InvalidValue if `saved` is no backup, or if there are accounts already; nothing is changed then.
    """
    accounts, audit, usage = _checked(saved)
    keys = AccountKeys()
    now_ms = await _now_ms(client)
    today = now_ms // DAY_MS
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch(keys.accounts, keys.audit)
        if await pipe.exists(keys.accounts, keys.audit):
            raise InvalidValue("file", "can only be restored where no account was ever made; this Redis has accounts")
        pipe.multi()  # type: ignore[no-untyped-call]
        if accounts:
            pipe.hset(keys.accounts, mapping={place: account.encode() for place, account in accounts.items()})
        for entry, fields in audit:
            pipe.xadd(keys.audit, fields, id=entry)
        pipe.xadd(keys.audit, {"at": now_ms, "actor": actor, "action": "restore", "accounts": "", "change": ""})
        for day, amounts in usage.items():
            pipe.delete(keys.usage(day))
            pipe.hset(keys.usage(day), mapping=amounts)
            pipe.expire(keys.usage(day), max(1, USAGE_S - (today - day) * DAY_S))
        for place, spent in _spent(accounts, usage, today).items():
            pipe.hset(keys.spent(place), mapping=spent)
        try:
            await pipe.execute()
        except WatchError:
            raise InvalidValue("file", "was not restored: another command made accounts meanwhile") from None
    return sum(account.kind == "key" for account in accounts.values())


def _checked(saved: Any) -> tuple[dict[str, Account], list[tuple[str, dict[Any, Any]]], dict[int, dict[Any, Any]]]:
    """Return accounts by place, audit entries, and usage by day. Raise InvalidValue."""
    if type(saved) is not dict or saved.keys() != {"format", "accounts", "audit", "usage"} or saved["format"] != FORMAT:
        raise InvalidValue("file", f"must be a backup of `quire keys backup`, format {FORMAT}")
    try:
        accounts = {place: Account.decode(place, data) for place, data in saved["accounts"].items()}
        audit = [(str(entry), {str(k): str(v) for k, v in fields.items()}) for entry, fields in saved["audit"]]
        usage = {
            int(day): {name: int(amount) for name, amount in amounts.items()} for day, amounts in saved["usage"].items()
        }
    except (AttributeError, TypeError, ValueError, InvalidValue) as error:
        raise InvalidValue("file", f"is a damaged backup: {error}") from None
    return accounts, audit, usage


def _spent(accounts: dict[str, Account], usage: dict[int, dict[Any, Any]], today: int) -> dict[str, dict[Any, Any]]:
    """Return the fields of `spent:<account>` by account: tokens and costs of this day and month."""
    month = _month(today)
    totals: dict[str, dict[Any, Any]] = {}
    for day, amounts in usage.items():
        for name, amount in amounts.items():
            owner, what = name.partition(" ")[0], name.rpartition(" ")[2]
            if what not in AMOUNTS or what in ("requests", "pinned") or _month(day) != month:
                continue
            kind = "cost" if what == "cost" else "tokens"
            account = accounts.get(f"key:{owner}")
            while account is not None:
                spent = totals.setdefault(account.place, {"day": today, "month": month})
                for period in ("month", "day") if day == today else ("month",):
                    spent[f"{period}_{kind}"] = spent.get(f"{period}_{kind}", 0) + amount
                account = accounts.get(account.parent_place)
    return totals


def _month(day: int) -> int:
    """Return the number of the month of a day since 1970, as `_limits.lua` counts: 12 times the year plus the month."""
    date = datetime.fromtimestamp(day * DAY_S, UTC)
    return 12 * date.year + date.month - 1


async def _now_ms(client: Redis) -> int:
    """Return the unix milliseconds of Redis."""
    seconds, micros = await client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def _texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in fields.items()}
