"""`quire keys`: makes, lists, limits, rotates, revokes, backs up and restores API keys.

Only `create` and `rotate` print a secret, once.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from quire.gateway.features.keys.key_settings import (
    AccountPlace,
    AuditKeys,
    BackUpKeys,
    CreateKey,
    KeyRedis,
    LimitAccount,
    LimitSettings,
    ListKeys,
    OneKey,
    RestoreKeys,
    RevokeKey,
    RotateKey,
    ShowAccount,
    UsageSettings,
)
from quire.shared.accounts.account import DEFAULT_NAME, Account
from quire.shared.accounts.backup import back_up, restore
from quire.shared.accounts.limits import LIMITS, AccountLimits
from quire.shared.accounts.store import AccountStore, UnknownAccount
from quire.shared.accounts.usage import as_csv, read_usage
from quire.shared.config.command_line import CommandError
from quire.shared.config.validators import InvalidValue
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.protocol.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client
from quire.shared.redis.url import BrokerUnavailable, parse_redis_url, redact

MAX_AUDIT_LINES = 1000


def run(settings: KeyRedis, environ: Mapping[str, str]) -> int:
    """Carry out the command of `settings` at its Redis, and print what it found. Raises CommandError."""
    raise_at_ctrl_c()
    return carry_out(
        settings, f"no Redis at {redact(settings.redis_url)}", "pass another --redis-url (QUIRE_REDIS_URL)"
    )


def carry_out(settings: KeyRedis, where: str, remedy: str) -> int:
    """Like `run`. `where` and `remedy` begin and end the error for a Redis that does not answer."""
    return asyncio.run(_carry_out(settings, where, remedy))


async def _carry_out(settings: KeyRedis, where: str, remedy: str) -> int:
    client = command_client(settings.redis_url, ACCOUNTS_TAG, connections=1)
    try:
        await _act(AccountStore(client, f"quire keys of {_user()}"), settings)
        return 0
    except BrokerUnavailable as error:
        raise CommandError(str(error)) from error
    except UnknownAccount as error:
        raise CommandError(f"there is no account {str(error)!r}: `list` shows all keys") from error
    except InvalidValue as error:
        place = "the " if error.name == "file" else f"--{error.name.replace('_', '-')}: "
        raise CommandError(f"{place}{error}") from error
    except (RedisError, OSError) as error:
        raise CommandError(f"{where}: {str(error).rstrip('.')}; {remedy}") from error
    finally:
        await client.aclose()


async def _act(store: AccountStore, settings: KeyRedis) -> None:
    act = next(act for kind, act in COMMANDS.items() if isinstance(settings, kind))
    await act(store, settings)


async def _usage(store: AccountStore, settings: UsageSettings) -> None:
    rows = await read_usage(store.client, store.keys.prefix, settings.days, settings.id)
    print(json.dumps([row.shown() for row in rows], indent=1) if settings.json else as_csv(rows), end="")


async def _list(store: AccountStore, settings: ListKeys) -> None:
    _print_all([account for account in await store.all() if account.kind == "key"], settings.json)


async def _create(store: AccountStore, settings: CreateKey) -> None:
    limits = _limits(AccountLimits(), settings)
    expires = await store.expiry(settings.expires_in_days * 86_400)
    made = await store.create(settings.organisation, settings.project, settings.name, limits, expires)
    _print_secret(*made, settings.json)


async def _rotate(store: AccountStore, settings: RotateKey) -> None:
    _print_secret(*await store.rotate(_key_id(settings), settings.grace_s), settings.json)


async def _revoke(store: AccountStore, settings: RevokeKey) -> None:
    account = await store.revoke(_key_id(settings))
    _print_one(account)
    print(
        f"Gateways refuse the key {account.id} within a second, and end its open calls within a few seconds.",
        file=sys.stderr,
    )


async def _back_up(store: AccountStore, settings: BackUpKeys) -> None:
    _refuse_cluster(settings, "backup")
    _write_file(settings.file, json.dumps(await back_up(store.client), indent=1))
    if settings.json and settings.file != "-":
        print(json.dumps({"file": settings.file}))


async def _restore(store: AccountStore, settings: RestoreKeys) -> None:
    _refuse_cluster(settings, "restore")
    count = await restore(store.client, _read_json(settings.file), store.actor)
    print(f"restored: API keys: {count}, with their limits, usage and audit log", file=sys.stderr)
    if settings.json:
        print(json.dumps({"restored": count}))


async def _audit(store: AccountStore, settings: AuditKeys) -> None:
    entries = await store.audit(MAX_AUDIT_LINES)
    if settings.json:
        print(json.dumps(list(map(asdict, entries)), indent=1))
        return
    for entry in entries:
        print(f"{_time(entry.at_ms // 1000)}  {entry.actor}  {entry.action}  {entry.accounts}  {entry.change}")


async def _show(store: AccountStore, settings: ShowAccount) -> None:
    _print_one(await store.get(_place(settings)))


async def _limit(store: AccountStore, settings: LimitAccount) -> None:
    account = await store.get(_place(settings))
    _print_one(await store.limit(account.place, _limits(account.limits, settings)))


COMMANDS: dict[type[KeyRedis], Callable[[AccountStore, Any], Awaitable[None]]] = {
    ListKeys: _list,
    CreateKey: _create,
    ShowAccount: _show,
    LimitAccount: _limit,
    RotateKey: _rotate,
    RevokeKey: _revoke,
    AuditKeys: _audit,
    UsageSettings: _usage,
    BackUpKeys: _back_up,
    RestoreKeys: _restore,
}


def _refuse_cluster(settings: KeyRedis, command: str) -> None:
    if parse_redis_url(settings.redis_url).kind == "cluster":
        raise CommandError(
            f"`{command}` does not work with a Redis Cluster, where the usage of keys lies with each model: use the "
            "backups of the cluster"
        )


def _write_file(path: str, content: str) -> None:
    """Write a new file that only its user can read, or to standard output. Raises CommandError."""
    if path == "-":
        print(content)
        return
    try:
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as file:
            file.write(content + "\n")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}; give the name of a new file") from error


def _read_json(path: str) -> Any:
    """Read JSON from a file or from standard input. Raises CommandError."""
    try:
        return json.loads(sys.stdin.read() if path == "-" else Path(path).read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise CommandError(f"{path} is not JSON: give a file of `quire keys backup`") from None


def _limits(limits: AccountLimits, settings: LimitSettings) -> AccountLimits:
    """Return the limits with those that the command line names. Raises InvalidValue."""
    given: dict[str, Any] = {name: getattr(settings, name, None) for name in LIMITS}  # only `limit` has a weight
    if settings.models is not None:
        given["models"] = [name.strip() for name in settings.models.split(",") if name.strip()]
    changed = AccountLimits.of({name: value for name, value in given.items() if value is not None})
    return replace(limits, **{name: getattr(changed, name) for name, value in given.items() if value is not None})


def _key_id(settings: OneKey) -> str:
    if not settings.id:
        raise CommandError("--id is missing: give one that `list` shows")
    return settings.id


def _place(settings: AccountPlace) -> str:
    """Return the account that the options name: a key, a project or an organisation. Raises CommandError."""
    organisation = settings.organisation or DEFAULT_NAME
    if settings.id:
        return f"key:{settings.id}"
    if settings.project is not None:
        return f"project:{organisation}/{settings.project}"
    if settings.organisation is not None:
        return f"organisation:{organisation}"
    raise CommandError("give the --id of a key, a --project, or an --organisation")


def _print_all(accounts: list[Account], as_json: bool) -> None:
    if as_json:
        print(json.dumps([account.shown() for account in accounts], indent=1))
        return
    for account in accounts:
        state = "revoked" if account.revoked else f"expires {_time(account.expires)}" if account.expires else "valid"
        limits = " ".join(f"{name}={value}" for name, value in account.limits.shown().items()) or "no limits"
        print(f"{account.id}  {account.parent}  {account.name}  {state}  {limits}")
    if not accounts:
        print("there is no API key", file=sys.stderr)


def _print_secret(account: Account, secret: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**account.shown(), "key": secret}, indent=1))
    else:
        print(secret)
        print(f"This is the only time that the secret of key {account.id} is shown; keep it.", file=sys.stderr)


def _print_one(account: Account) -> None:
    print(json.dumps(account.shown(), indent=1))


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _user() -> str:
    """Return the name of the user of this process, for the audit log."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in containers
        return "an unnamed user"
