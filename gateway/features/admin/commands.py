"""The command about the dead-letter queue: its settings, what its `--help` says, and which code runs it.

This module stays light: `--help` must not load the Redis client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.shared.config.command_line import Command
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
    json: bool = option(False, variable="", help="Print the result as JSON.")


def run_dead_letters(settings: DeadLetterSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action on the dead-letter queue."""
    from quire.gateway.features.admin.dead_letters import run

    return run(settings, environ)


DEAD_LETTERS = Command(
    "List, show, retry or drop requests that were given up.",
    "A request with which three workers died, one after the other, is given up and kept. List such requests, show one, "
    "drop one, or retry one: it is queued again as a new request, whose output stays in Redis for ten minutes.",
    (
        "{prog}",
        "{prog} show --entry 1763740800000-0",
        "{prog} retry --entry 1763740800000-0 --redis-url redis://127.0.0.1:6379/0",
    ),
    DeadLetterSettings,
    run_dead_letters,
)
