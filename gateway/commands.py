"""The commands of the gateway: what their `--help` says, and which code runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.gateway.admin.dead_letter_settings import DeadLetterSettings
from quire.gateway.settings import GatewaySettings
from quire.shared.command_line import Command
from quire.shared.model_argument import resolve_model


def run_gateway(settings: GatewaySettings, environ: Mapping[str, str]) -> int:
    """Serve until told to stop."""
    from quire.gateway.main import run

    return run(replace(settings, model=resolve_model(settings.model)))


def run_dead_letters(settings: DeadLetterSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action on the dead-letter queue."""
    from quire.gateway.admin.dead_letters import run

    return run(settings, environ)


GATEWAY = Command(
    "Start one gateway: the HTTP server between clients and Redis.",
    "Start one gateway. It holds no state: start any number of them in front of the same Redis.",
    (
        "{prog} --redis-url redis://127.0.0.1:6379/0 --port 8000",
        "{prog} ./my-model --host 0.0.0.0",
    ),
    GatewaySettings,
    run_gateway,
)

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
