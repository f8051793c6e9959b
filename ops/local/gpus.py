"""The assignment of a machine's GPUs to the workers of `quire serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
# NVIDIA's driver has a folder here for each GPU.
DRIVER = Path("/proc/driver/nvidia/gpus")


def of_worker(index: int, workers: int, each: int, environ: Mapping[str, str], driver: Path = DRIVER) -> dict[str, str]:
    """The environment that assigns `each` GPUs to the worker `index`.

    Empty if there is a single worker, which uses all GPUs, or if there are too few GPUs for separate ones.
    """
    if (given := environ.get(VARIABLE)) is not None:
        gpus = [name.strip() for name in given.split(",") if name.strip()]
    else:
        gpus = list(map(str, range(len(list(driver.iterdir())) if driver.is_dir() else 0)))
    if workers == 1 or len(gpus) < workers * each:
        return {}
    return {VARIABLE: ",".join(gpus[index * each : (index + 1) * each])}
