"""The settings of the commands of `quire keys`. This module stays light: `--help` must not load the Redis client.

Only the Redis of the keys can be set in the environment: a change of keys is asked for on a command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.accounts.account import DEFAULT_NAME
from quire.shared.config.settings import option
from quire.shared.protocol.keys import DEFAULT_CLASS, PRIORITY_CLASSES
from quire.shared.protocol.share import DEFAULT_WEIGHT, MAX_WEIGHT
from quire.shared.redis.url import DEFAULT_REDIS_URL

FLAG_ONLY = ""


@dataclass(frozen=True, kw_only=True)
class KeyRedis:
    """The Redis that holds the keys."""

    redis_url: str = option(DEFAULT_REDIS_URL, help="Redis that holds the keys.", metavar="URL", secret=True, last=True)
    json: bool = option(False, variable=FLAG_ONLY, help="Print the result as JSON.", last=True)


@dataclass(frozen=True, kw_only=True)
class LimitSettings(KeyRedis):
    """The limits of an account. A limit that is None keeps its value; 0 is no limit."""

    models: str | None = option(
        None,
        variable=FLAG_ONLY,
        metavar="NAMES",
        help="Models and adapters that calls may name, separated by commas; an empty text allows all.",
    )
    priority: str | None = option(
        None,
        variable=FLAG_ONLY,
        metavar="CLASS",
        help=f"Highest priority class of calls: {', '.join(PRIORITY_CLASSES)}; without it {DEFAULT_CLASS}.",
    )
    max_tokens: int | None = option(
        None, minimum=0, variable=FLAG_ONLY, metavar="N", help="Largest max_tokens of a call."
    )
    requests_per_minute: int | None = option(None, minimum=0, variable=FLAG_ONLY, metavar="N", help="Calls per minute.")
    tokens_per_minute: int | None = option(
        None, minimum=0, variable=FLAG_ONLY, metavar="N", help="Tokens of prompts and answers per minute."
    )
    concurrent_requests: int | None = option(
        None,
        minimum=0,
        variable=FLAG_ONLY,
        metavar="N",
        help="Requests that wait or run at the same time; each prompt of a call is a request.",
    )
    tokens_per_day: int | None = option(None, minimum=0, variable=FLAG_ONLY, metavar="N", help="Tokens per day (UTC).")
    tokens_per_month: int | None = option(
        None, minimum=0, variable=FLAG_ONLY, metavar="N", help="Tokens per month (UTC)."
    )
    cost_per_day: float | None = option(
        None,
        minimum=0,
        variable=FLAG_ONLY,
        metavar="AMOUNT",
        help="Money per day (UTC), in the unit of the prices of --prices.",
    )
    cost_per_month: float | None = option(
        None,
        minimum=0,
        variable=FLAG_ONLY,
        metavar="AMOUNT",
        help="Money per month (UTC), in the unit of the prices of --prices.",
    )


@dataclass(frozen=True, kw_only=True)
class ListKeys(KeyRedis):
    """`list`: all keys."""


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """The name and place of a new key, and how long it is valid."""

    name: str = option("default", variable=FLAG_ONLY, metavar="NAME", help="Name of the key.")
    project: str = option(DEFAULT_NAME, variable=FLAG_ONLY, metavar="NAME", help="Project of the key.")
    organisation: str = option(DEFAULT_NAME, variable=FLAG_ONLY, metavar="NAME", help="Organisation of the project.")
    expires_in_days: int = option(
        0,
        minimum=0,
        maximum=36_500,
        variable=FLAG_ONLY,
        metavar="N",
        help="Days for which the key is valid; 0 for no end.",
    )


@dataclass(frozen=True, kw_only=True)
class CreateKey(LimitSettings, NewKey):
    """`create`: a new key."""


@dataclass(frozen=True, kw_only=True)
class AccountPlace:
    """An account: a key, a project, or an organisation."""

    id: str = option(
        "", positional=True, variable=FLAG_ONLY, metavar="ID", help="The key: the 16 digits that `list` prints."
    )
    project: str | None = option(
        None, variable=FLAG_ONLY, metavar="NAME", help="Without an id: this project, of --organisation."
    )
    organisation: str | None = option(
        None,
        variable=FLAG_ONLY,
        metavar="NAME",
        help="Without an id and --project: this organisation. With --project: the organisation of the project, by "
        f"default `{DEFAULT_NAME}`.",
    )


@dataclass(frozen=True, kw_only=True)
class ShowAccount(AccountPlace, KeyRedis):
    """`show`: one account with its limits."""


@dataclass(frozen=True, kw_only=True)
class LimitAccount(LimitSettings, AccountPlace):
    """`limit`: changes the limits of an account that are given."""

    weight: int | None = option(
        None,
        minimum=0,
        maximum=MAX_WEIGHT,
        variable=FLAG_ONLY,
        metavar="N",
        help=f"Weight of a project in fair sharing, {DEFAULT_WEIGHT} by default: with --project.",
    )


@dataclass(frozen=True, kw_only=True)
class OneKey(KeyRedis):
    """A key that must be named."""

    id: str = option(
        "", positional=True, variable=FLAG_ONLY, metavar="ID", help="The key: the 16 digits that `list` prints."
    )


@dataclass(frozen=True, kw_only=True)
class RotateKey(OneKey):
    """`rotate`: a new secret for a key."""

    grace_s: int = option(
        0,
        minimum=0,
        maximum=30 * 86_400,
        variable=FLAG_ONLY,
        metavar="SECONDS",
        help="Seconds for which the old secret stays valid.",
    )


@dataclass(frozen=True, kw_only=True)
class RevokeKey(OneKey):
    """`revoke`: the end of a key."""


@dataclass(frozen=True, kw_only=True)
class AuditKeys(KeyRedis):
    """`audit`: the log of changes."""


@dataclass(frozen=True, kw_only=True)
class UsageSettings(KeyRedis):
    """`usage`: requests, tokens and costs. Also the settings of `quire usage`."""

    id: str = option("", variable=FLAG_ONLY, metavar="ID", help="Key whose usage is printed; by default all keys.")
    days: int = option(
        31, minimum=1, maximum=400, variable=FLAG_ONLY, metavar="N", help="Days of the usage, today included."
    )


@dataclass(frozen=True, kw_only=True)
class BackUpKeys(KeyRedis):
    """`backup`: all accounts as a file."""

    file: str = option("-", positional=True, variable=FLAG_ONLY, metavar="FILE", help="New file; - is standard output.")


@dataclass(frozen=True, kw_only=True)
class RestoreKeys(KeyRedis):
    """`restore`: the accounts of a backup."""

    file: str = option(
        "-", positional=True, variable=FLAG_ONLY, metavar="FILE", help="File of `backup`; - is standard input."
    )
