"""The commands of the gateway: what their `--help` says, and which code runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.gateway.admin.dead_letter_settings import DeadLetterSettings
from quire.gateway.admin.key_settings import KeySettings, UsageSettings
from quire.gateway.admin.parking_settings import ParkingSettings
from quire.gateway.settings import GatewaySettings
from quire.shared.command_line import Command
from quire.shared.model_argument import resolve_model


def run_gateway(settings: GatewaySettings, environ: Mapping[str, str]) -> int:
    """Serve until told to stop."""
    from quire.gateway.server.main import run

    return run(settings if settings.discover_models else replace(settings, model=resolve_model(settings.model)))


def run_dead_letters(settings: DeadLetterSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action on the dead-letter queue."""
    from quire.gateway.admin.dead_letters import run

    return run(settings, environ)


def run_keys(settings: KeySettings | UsageSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action on API keys."""
    from quire.gateway.admin.api_keys import run

    return run(settings, environ)


def run_parking(settings: ParkingSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action on parked requests."""
    from quire.gateway.admin.parked_requests import run

    return run(settings, environ)


GATEWAY = Command(
    "Start one gateway: the HTTP server between clients and Redis.",
    "Start one gateway. It holds no state: start any number of them in front of the same Redis.",
    (
        "{prog} --redis-url redis://127.0.0.1:6379/0 --port 8000",
        "{prog} ./my-model --host 0.0.0.0",
        "{prog} --discover-models    # every model that workers register, without a model folder",
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

PARKING = Command(
    "List parked requests, park requests, or queue them again.",
    "A parked request keeps its tokens while no worker computes it, and continues at the same token once it is queued "
    "again. The action `park` parks every request that waits or runs, of one model, or of one worker; `unpark` queues "
    "parked requests again.",
    (
        "{prog}",
        "{prog} park --served-model-name qwen --retention-s 43200",
        "{prog} park --worker gpu-7",
        "{prog} unpark",
    ),
    ParkingSettings,
    run_parking,
)

KEYS = Command(
    "Create, list, limit, rotate, revoke or back up API keys.",
    "API keys of projects and organisations, with their limits. A secret is shown once, when it is created or rotated; "
    "Redis has only its hash. Gateways know a change within a second. The action `revoke` cannot be undone, and ends "
    "the open calls of the key within a few seconds.",
    (
        "{prog} create --project web --name ci --requests-per-minute 60 --tokens-per-month 50000000",
        "{prog}",
        "{prog} limit --id 0123456789abcdef --tokens-per-minute 100000",
        "{prog} limit --organisation acme --tokens-per-day 10000000",
        "{prog} rotate --id 0123456789abcdef --grace-s 3600",
        "{prog} revoke --id 0123456789abcdef",
        "{prog} backup --file keys.json    # and `restore` into an empty Redis",
    ),
    KeySettings,
    run_keys,
)

USAGE = Command(
    "Print requests, tokens and costs by day, key and model.",
    "The usage of API keys as CSV, or as JSON with --json. A request counts on the day (UTC) on which it was accepted, "
    "once it has ended. It is `quire keys usage`.",
    ("{prog}", "{prog} --days 1 --id 0123456789abcdef", "{prog} --json"),
    UsageSettings,
    run_keys,
)
