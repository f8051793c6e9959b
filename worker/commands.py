"""The command of the worker: what its `--help` says, and which code runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from quire.shared.config.command_line import Command, CommandError
from quire.shared.model.model_argument import DEFAULT_MODEL, resolve_model
from quire.shared.redis.lean_import import skip_metrics
from quire.worker.replay.commands import WorkerCommandSettings, canary_of


def run_worker(settings: WorkerCommandSettings, environ: Mapping[str, str]) -> int:
    """Serve until told to stop, and end the process."""
    skip_metrics()
    from quire.worker.main import run

    if settings.models_dir:
        return run(settings, _host_of(settings))
    settings = replace(settings, model=resolve_model(settings.model))
    return run(settings, canary_of(settings))


def _host_of(settings: WorkerCommandSettings) -> partial[None]:
    """Return what serves as a model host. Raise CommandError for settings of a worker of one model."""
    if settings.canary:
        raise CommandError("--canary computes requests of one model again; give it a MODEL instead of --models-dir")
    if settings.model != DEFAULT_MODEL:
        raise CommandError(f"MODEL {settings.model} and --models-dir {settings.models_dir}: give one of them")
    return partial(_serve_folder, settings)


def _serve_folder(settings: WorkerCommandSettings) -> None:
    from quire.worker.host.main import serve

    serve(settings)


WORKER = Command(
    "Start one worker: a model that takes requests from Redis.",
    "Start one worker: a replica of the model that takes requests from Redis as it has room for them.",
    (
        "{prog} --redis-url redis://127.0.0.1:6379/0",
        "{prog} ./my-model --dtype bfloat16 --worker-id worker-2",
        "{prog} --models-dir ./models --models-max 2    # loads what calls ask for",
        "{prog} ./large-model --device cuda --tensor-parallel-size 4    # shared by four GPUs",
    ),
    WorkerCommandSettings,
    run_worker,
)
