"""The command of the gateway: what its `--help` says, and which code runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.gateway.settings import GatewaySettings
from quire.shared.config.command_line import Command
from quire.shared.model.model_argument import resolve_model
from quire.shared.redis.lean_import import skip_metrics


def run_gateway(settings: GatewaySettings, environ: Mapping[str, str]) -> int:
    """Serve until told to stop."""
    skip_metrics()
    from quire.gateway.server.main import run

    return run(settings if settings.discover_models else replace(settings, model=resolve_model(settings.model)))


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
