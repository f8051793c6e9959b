"""Which of a machine's GPUs each worker of `quire serve` has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
# A folder for each GPU, where there is NVIDIA's driver.
DRIVER = Path("/proc/driver/nvidia/gpus")


def of_worker(index: int, workers: int, each: int, environ: Mapping[str, str], driver: Path = DRIVER) -> dict[str, str]:
    """The environment that gives worker `index` its `each` GPUs; nothing where one worker takes what it finds, or where
    there are too few for each to have its own."""
    if (given := environ.get(VARIABLE)) is not None:
        gpus = [name.strip() for name in given.split(",") if name.strip()]
    else:
        gpus = list(map(str, range(len(list(driver.iterdir())) if driver.is_dir() else 0)))
    if workers == 1 or len(gpus) < workers * each:
        return {}
    return {VARIABLE: ",".join(gpus[index * each : (index + 1) * each])}
