"""The command of the worker: what its `--help` says, and which code runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.shared.config.command_line import Command
from quire.shared.model.model_argument import resolve_model
from quire.worker.replay.commands import WorkerCommandSettings, canary_of


def run_worker(settings: WorkerCommandSettings, environ: Mapping[str, str]) -> int:
    """Serve until told to stop, and end the process."""
    from quire.worker.main import run

    settings = replace(settings, model=resolve_model(settings.model))
    return run(settings, canary_of(settings))


WORKER = Command(
    "Start one worker: a model that takes requests from Redis.",
    "Start one worker: a replica of the model that takes requests from Redis as it has room for them.",
    (
        "{prog} --redis-url redis://127.0.0.1:6379/0",
        "{prog} ./my-model --dtype bfloat16 --worker-id worker-2",
        "{prog} ./large-model --device cuda --tensor-parallel-size 4    # shared by four GPUs",
    ),
    WorkerCommandSettings,
    run_worker,
)
