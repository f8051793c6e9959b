"""The number of ranks that share a model: --tensor-parallel-size, or one per NUMA node."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from quire.shared.process.errors import StartError
from quire.worker.device.placement import default_ranks
from quire.worker.device.topology import read_topology
from quire.worker.models.choice import Checkpoint
from quire.worker.models.native.config import ModelConfig
from quire.worker.models.native.sharding import NotDivisible, Shard, can_share
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def choose_ranks(settings: WorkerSettings, device: torch.device, config: Checkpoint) -> WorkerSettings:
    """Return the settings with the number of ranks that --tensor-parallel-size 0 stands for."""
    if settings.tensor_parallel_size:
        return settings
    can_be_shared = device.type == "cpu" and isinstance(config, ModelConfig) and settings.thread_binding != "none"

    def fits(size: int) -> bool:
        return isinstance(config, ModelConfig) and can_share(config, size)

    ranks = default_ranks(read_topology(), fits) if can_be_shared and not settings.threads else 1
    if ranks > 1:
        log.info("%d ranks share the model, one per NUMA node; --tensor-parallel-size sets the number", ranks)
    return replace(settings, tensor_parallel_size=ranks)


def check_ranks(settings: WorkerSettings, device: torch.device, config: Checkpoint) -> None:
    """Raise StartError if --tensor-parallel-size ranks cannot share the model, or exceed the number of GPUs."""
    size = settings.num_ranks
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise StartError(
            f"--tensor-parallel-size {size} needs as many GPUs, and there are {torch.cuda.device_count()}: see "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or lower it"
        )
    if not isinstance(config, ModelConfig):
        heads = config.num_heads
        if heads is not None and heads % size:
            possible = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
            raise StartError(f"--tensor-parallel-size {size}: {size} ranks cannot share {heads} heads; {possible} can")
        return  # the rest is examined while the model is loaded (`quire.worker.models.transformers`)
    try:
        Shard(config, 0, size)
    except NotDivisible as error:
        raise StartError(f"--tensor-parallel-size {size}: {error}") from error
