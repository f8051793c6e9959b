"""The settings of `quire keys`. This module stays light: `--help` must not load the Redis client."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.keys import DEFAULT_CLASS, PRIORITY_CLASSES
from quire.shared.redis.url import DEFAULT_REDIS_URL
from quire.shared.settings import option
from quire.shared.share import DEFAULT_WEIGHT, MAX_WEIGHT

ACTIONS = ("list", "create", "show", "revoke", "rotate", "limit", "audit", "usage", "backup", "restore")


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """One action on API keys, and the Redis that holds them. A limit that is None keeps its value; 0 is no limit."""

    action: str = option(
        "list",
        positional=True,
        variable="QUIRE_KEYS_ACTION",
        metavar="ACTION",
        choices=ACTIONS,
        help="List all keys; create one; show, revoke, rotate or limit one; show the audit log of changes; "
        "print the usage as CSV; or back up all accounts to a file and restore them from it.",
    )
    file: str = option(
        "-",
        variable="QUIRE_KEYS_FILE",
        metavar="FILE",
        help="File of `backup` and `restore`; - is standard output or standard input.",
    )
    id: str = option(
        "",
        variable="QUIRE_KEYS_ID",
        metavar="ID",
        help="Key to show, revoke, rotate or limit: the 16 digits that `list` prints.",
    )
    name: str = option("default", variable="QUIRE_KEYS_NAME", metavar="NAME", help="Name of a new key.")
    project: str | None = option(
        None,
        variable="QUIRE_KEYS_PROJECT",
        metavar="NAME",
        help="Project of a new key, by default `default`. With `show` and `limit` and without --id: this project.",
    )
    organisation: str | None = option(
        None,
        variable="QUIRE_KEYS_ORGANISATION",
        metavar="NAME",
        help="Organisation of the project, by default `default`. With `show` and `limit`, and with neither --id nor "
        "--project: this organisation.",
    )
    expires_in_days: int = option(
        0,
        minimum=0,
        maximum=36_500,
        variable="QUIRE_KEYS_EXPIRES_IN_DAYS",
        metavar="N",
        help="Days for which a new key is valid; 0 for no end.",
    )
    grace_s: int = option(
        0,
        minimum=0,
        maximum=30 * 86_400,
        variable="QUIRE_KEYS_GRACE_S",
        metavar="SECONDS",
        help="Seconds for which the old secret of a rotated key stays valid.",
    )
    models: str | None = option(
        None,
        variable="QUIRE_KEYS_MODELS",
        metavar="NAMES",
        help="Models and adapters that calls may name, separated by commas; an empty text allows all.",
    )
    priority: str | None = option(
        None,
        variable="QUIRE_KEYS_PRIORITY",
        metavar="CLASS",
        help=f"Highest priority class of calls: {', '.join(PRIORITY_CLASSES)}; without it {DEFAULT_CLASS}.",
    )
    max_tokens: int | None = option(
        None, minimum=0, variable="QUIRE_KEYS_MAX_TOKENS", metavar="N", help="Largest max_tokens of a call."
    )
    requests_per_minute: int | None = option(
        None, minimum=0, variable="QUIRE_KEYS_REQUESTS_PER_MINUTE", metavar="N", help="Calls per minute."
    )
    tokens_per_minute: int | None = option(
        None,
        minimum=0,
        variable="QUIRE_KEYS_TOKENS_PER_MINUTE",
        metavar="N",
        help="Tokens of prompts and answers per minute.",
    )
    concurrent_requests: int | None = option(
        None,
        minimum=0,
        variable="QUIRE_KEYS_CONCURRENT_REQUESTS",
        metavar="N",
        help="Requests that wait or run at the same time; each prompt of a call is a request.",
    )
    tokens_per_day: int | None = option(
        None, minimum=0, variable="QUIRE_KEYS_TOKENS_PER_DAY", metavar="N", help="Tokens per day (UTC)."
    )
    tokens_per_month: int | None = option(
        None, minimum=0, variable="QUIRE_KEYS_TOKENS_PER_MONTH", metavar="N", help="Tokens per month (UTC)."
    )
    cost_per_day: float | None = option(
        None,
        minimum=0,
        variable="QUIRE_KEYS_COST_PER_DAY",
        metavar="AMOUNT",
        help="Money per day (UTC), in the unit of the prices of --prices.",
    )
    cost_per_month: float | None = option(
        None,
        minimum=0,
        variable="QUIRE_KEYS_COST_PER_MONTH",
        metavar="AMOUNT",
        help="Money per month (UTC), in the unit of the prices of --prices.",
    )
    weight: int | None = option(
        None,
        minimum=0,
        maximum=MAX_WEIGHT,
        variable="QUIRE_KEYS_WEIGHT",
        metavar="N",
        help=f"Weight of a project in fair sharing, {DEFAULT_WEIGHT} by default: with `limit` and --project.",
    )
    days: int = option(
        31,
        minimum=1,
        maximum=400,
        variable="QUIRE_KEYS_DAYS",
        metavar="N",
        help="Days of `usage`, today included.",
    )
    json: bool = option(False, variable="QUIRE_KEYS_JSON", help="Print JSON instead of lines.")
    redis_url: str = option(DEFAULT_REDIS_URL, help="Redis that holds the keys.", metavar="URL", secret=True)


@dataclass(frozen=True, kw_only=True)
class UsageSettings:
    """The settings of `quire usage`: those of `quire keys usage`."""

    action: str = option("usage", variable="QUIRE_USAGE_ACTION", choices=("usage",), help="Print the usage as CSV.")
    id: str = option(
        "", variable="QUIRE_KEYS_ID", metavar="ID", help="Key whose usage is printed; by default all keys."
    )
    days: int = option(
        31, minimum=1, maximum=400, variable="QUIRE_KEYS_DAYS", metavar="N", help="Days of the usage, today included."
    )
    json: bool = option(False, variable="QUIRE_KEYS_JSON", help="Print JSON instead of lines.")
    redis_url: str = option(DEFAULT_REDIS_URL, help="Redis that holds the keys.", metavar="URL", secret=True)
