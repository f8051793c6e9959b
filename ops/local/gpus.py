"""The assignment of a machine's GPUs to the workers of `quire serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.shared.config.command_line import CommandError

VARIABLE = "CUDA_VISIBLE_DEVICES"
# NVIDIA's driver has a folder here for each GPU.
DRIVER = Path("/proc/driver/nvidia/gpus")


def of_worker(index: int, workers: int, each: int, environ: Mapping[str, str], driver: Path = DRIVER) -> dict[str, str]:
    """Return the environment that assigns `each` GPUs to the worker `index`.

    Empty if there is a single worker, which uses all GPUs, or if there are too few GPUs for all.
    """
    gpus = _gpus(environ, driver)
    if workers == 1 or len(gpus) < workers * each:
        return {}
    return {VARIABLE: ",".join(gpus[index * each : (index + 1) * each])}


def check_separate(workers: int, each: int, environ: Mapping[str, str], driver: Path = DRIVER) -> None:
    """Raise CommandError if workers of several models would share a GPU: each takes most of the memory that is free."""
    gpus = _gpus(environ, driver)
    if gpus and len(gpus) < workers * each:
        raise CommandError(
            f"{workers} workers of several models need {workers * each} GPUs, and there are {len(gpus)}: give each "
            "worker's cache a size with --kv-cache-gb, so that they can share a GPU, or start fewer"
        )


def _gpus(environ: Mapping[str, str], driver: Path) -> list[str]:
    if (given := environ.get(VARIABLE)) is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return list(map(str, range(len(list(driver.iterdir())) if driver.is_dir() else 0)))
