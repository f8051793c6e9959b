"""The device that the model runs on, and the dtype of its weights and activations."""

from __future__ import annotations

import torch

from quire import kernels
from quire.worker.errors import WorkerStartError
from quire.worker.models.config import ModelConfig
from quire.worker.models.sharding import NotDivisible, Shard
from quire.worker.models.transformers_config import TransformersConfig
from quire.worker.settings import WorkerSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Compute capabilities from which on a GPU computes in bfloat16, and converts 8-bit floats.
BFLOAT16_SINCE, FP8_SINCE = (8, 0), (8, 9)


def choose_device(name: str) -> torch.device:
    """Return the device of --device. `auto` is a CUDA device if there is one. Raises WorkerStartError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise WorkerStartError(
            "--device cuda: the installed torch computes on CPUs only; install its CUDA build, or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise WorkerStartError(
            "--device cuda: torch finds no CUDA device; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of --dtype. `auto` is bfloat16 if the device supports it, else the next best.

    Raises WorkerStartError.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        has_bfloat16 = capability >= BFLOAT16_SINCE
        if name == "bfloat16" and not has_bfloat16:
            raise WorkerStartError(
                f"--dtype bfloat16 needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}; use "
                "--dtype float16"
            )
        return DTYPES.get(name, torch.bfloat16 if has_bfloat16 else torch.float16)
    if name == "float16":
        raise WorkerStartError("--dtype float16 is for GPUs: on a CPU use --dtype bfloat16 or float32, or auto")
    if name != "auto":
        return DTYPES[name]
    try:
        kernels.CpuOps(torch.bfloat16)
        return torch.bfloat16
    except kernels.KernelsUnavailable:
        return torch.float32


def has_fp8(device: torch.device) -> bool:
    """Return whether a CUDA device converts 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= FP8_SINCE


def describe(device: torch.device) -> str:
    """Return a description of the device for the log."""
    if device.type == "cpu":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"


def check_ranks(settings: WorkerSettings, device: torch.device, config: ModelConfig | TransformersConfig) -> None:
    """Raise WorkerStartError if --tensor-parallel-size ranks cannot share the model, or exceed the number of GPUs."""
    size = settings.tensor_parallel_size
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise WorkerStartError(
            f"--tensor-parallel-size {size} needs as many GPUs, and there are {torch.cuda.device_count()}: see "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or lower it"
        )
    if isinstance(config, TransformersConfig):
        if size > 1:
            raise WorkerStartError(
                f"--tensor-parallel-size {size}: {config.architecture} is computed by Transformers, by one process; "
                "lower it to 1, or give a model that Quire's own decoder knows (docs/quickstart.md)"
            )
        return
    try:
        Shard(config, 0, size)
    except NotDivisible as error:
        raise WorkerStartError(f"--tensor-parallel-size {size}: {error}") from error
