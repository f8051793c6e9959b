"""The settings of `quire-dead`. This module stays light: `--help` must not load the Redis client."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.config.settings import option
from quire.shared.redis.url import DEFAULT_REDIS_URL


@dataclass(frozen=True, kw_only=True)
class DeadLetterSettings:
    """The settings of `quire-dead`: the action on dead-lettered requests, and the Redis that holds the requests."""

    action: str = option(
        "list",
        positional=True,
        variable="QUIRE_DEAD_ACTION",
        metavar="ACTION",
        choices=("list", "show", "retry", "drop"),
        help="List all requests, or show, retry or drop one.",
    )
    entry: str = option(
        "", variable="QUIRE_DEAD_ENTRY", metavar="ID", help="Entry to show, retry or drop, as `list` prints it."
    )
    redis_url: str = option(DEFAULT_REDIS_URL, help="Redis that holds the requests.", metavar="URL", secret=True)
    served_model_name: str = option("", metavar="NAME", help="Only requests of this model; by default of all models.")
    count: int = option(
        100, minimum=1, maximum=10_000, variable="QUIRE_DEAD_COUNT", metavar="N", help="Entries to list at most."
    )
