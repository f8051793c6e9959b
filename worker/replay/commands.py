"""The command `quire replay`, and `quire worker --canary`: settings, what `--help` says, and which code runs them.

This module stays light: `--help` must load neither torch nor the Redis client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from quire.shared.config.command_line import Command
from quire.shared.config.settings import option
from quire.worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class WorkerCommandSettings(WorkerSettings):
    """The settings of `quire worker`. `quire serve` and the environment make no canaries."""

    canary: float = option(
        0.0,
        minimum=0,
        maximum=1,
        variable="",
        metavar="SHARE",
        help="Serve no requests, but compute this share of the model's ended requests again, and export how many "
        "tokens are chosen again: to try a build, a quantisation or a GPU on real traffic. 0 serves requests.",
    )


def canary_of(settings: WorkerCommandSettings) -> partial[None] | None:
    """Return what serves as a canary; None for a worker."""
    return partial(_serve, settings) if settings.canary else None


def _serve(settings: WorkerCommandSettings) -> None:
    from quire.worker.replay.canary import serve

    serve(settings)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(WorkerSettings):
    """The settings of `quire replay`: the request, and those with which a worker builds its engine."""

    id: str = option(
        "",
        positional=True,
        variable="",
        metavar="ID",
        help="Request to replay, as answers, logs and the header X-Quire-Request-Id name it.",
    )
    model: str = option(
        "models/demo",
        metavar="MODEL",
        help="Folder of the checkpoint, a GGUF file, or a Hugging Face name: the model that computed the request.",
    )
    json: bool = option(False, variable="", help="Print the result as JSON.")
    log_level: str = option(
        "warning",
        choices=("debug", "info", "warning", "error"),
        help="Least severe level that is logged.",
        last=True,
    )


def run_replay(settings: ReplaySettings, environ: Mapping[str, str]) -> int:
    """Replay one request. Returns 0 if every token is chosen again, and 1 if one differs."""
    from quire.worker.replay.replay_command import run

    return run(settings)


REPLAY = Command(
    "Compute a logged request again, and compare its tokens.",
    "Read a request that runs, or has ended less than ten minutes ago, from Redis, compute its prompt and output as "
    "one prompt, and choose each token again. Nothing in Redis changes. The flags of `quire worker` that say how the "
    "model computes are accepted too; give those of the worker. The exit code is 0 if all tokens are equal, 1 if one "
    "differs, and 2 if the request cannot be replayed.",
    (
        "{prog} chatcmpl-0123456789abcdef0123456789abcdef",
        "{prog} 0123456789abcdef0123456789abcdef --model ./my-model --dtype bfloat16 --json",
    ),
    ReplaySettings,
    run_replay,
)
