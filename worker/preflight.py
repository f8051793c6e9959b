"""Checks before a model is loaded: settings that contradict each other, and weights that do not fit into memory."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.shared.errors import StartError
from quire.worker.device import memory_plan
from quire.worker.models.paged import CheckpointConfig
from quire.worker.settings import WorkerSettings

GIB = 1024**3


def check_settings(settings: WorkerSettings, device: torch.device) -> None:
    """Raise StartError for settings that contradict each other."""
    tokens, sequences = memory_plan.max_num_batched_tokens(settings, device), memory_plan.max_num_seqs(settings, device)
    if tokens < sequences:
        raise StartError(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {sequences}: each running sequence needs one "
            "token of every step; raise the first"
        )
    if settings.beat_s > settings.lease_s / 2:
        raise StartError(
            f"--beat-s {settings.beat_s:g} is more than half of --lease-s {settings.lease_s:g}: a worker would "
            "lose its requests by one late heartbeat; lower the first or raise the second"
        )
    if settings.preemption == "swap" and not settings.swap_gb:
        raise StartError(
            "--preemption swap needs host memory, and --swap-gb is 0: raise it, or take --preemption recompute"
        )


def check_weights(
    path: Path, config: CheckpointConfig, dtype: torch.dtype, device: torch.device, ranks: int = 1
) -> None:
    """Raise StartError for weights that do not fit into memory, before loading them takes minutes."""
    needed, free = config.least_weight_bytes(dtype), memory_plan.free_memory(device)
    if device.type == "cuda":  # each rank has a GPU of its own
        needed //= ranks
    if needed > free:
        where = "GPU" if device.type == "cuda" else "machine"
        narrower = ", take --dtype bfloat16 or float16" if dtype.itemsize > 2 else ""
        raise StartError(
            f"{path}: its weights take {needed / GIB:.2f} GiB as {str(dtype)[6:]}, and {free / GIB:.2f} GiB of the "
            f"{where}'s memory are free: end what else uses it{narrower}, or take a smaller model or a larger {where}"
        )
