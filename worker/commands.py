"""The command of the worker: what its `--help` says, and which code runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.shared.config.command_line import Command
from quire.shared.model.model_argument import resolve_model
from quire.worker.settings import WorkerSettings


def run_worker(settings: WorkerSettings, environ: Mapping[str, str]) -> int:
    """Serve until told to stop, and end the process."""
    from quire.worker.main import run

    return run(replace(settings, model=resolve_model(settings.model)))


WORKER = Command(
    "Start one worker: a model that takes requests from Redis.",
    "Start one worker: a replica of the model that takes requests from Redis as it has room for them.",
    (
        "{prog} --redis-url redis://127.0.0.1:6379/0",
        "{prog} ./my-model --dtype bfloat16 --worker-id worker-2",
        "{prog} ./large-model --device cuda --tensor-parallel-size 4    # shared by four GPUs",
    ),
    WorkerSettings,
    run_worker,
)
