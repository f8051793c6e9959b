"""Checks before a model is loaded: settings that contradict each other, and weights that do not fit into memory."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.shared.process.errors import StartError
from quire.worker.device import devices
from quire.worker.models.choice import Checkpoint
from quire.worker.models.files.formats import kept_bytes
from quire.worker.models.native.config import ModelConfig
from quire.worker.settings import WorkerSettings

GIB = 1024**3


def check_settings(settings: WorkerSettings, device: torch.device) -> None:
    """Raise StartError for settings that contradict each other."""
    tokens, sequences = devices.max_num_batched_tokens(settings, device), devices.max_num_seqs(settings, device)
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


LEAST_QUANTIZED_BITS = 4.5  # of a weight of a quantised checkpoint as the kernels keep it, with its scale


def check_weights(
    path: Path, config: Checkpoint, dtype: torch.dtype, device: torch.device, ranks: int = 1, bits: int | str = 0
) -> None:
    """Raise StartError for weights that do not fit into memory, before loading them takes minutes.

    bits: of weights that are quantised on load, or FP8; 0: not quantised. A model that Transformers computes has all
    weights in `dtype` while it is loaded.
    """
    kept = dtype
    is_rounded_later = not isinstance(config, ModelConfig)
    bits = 0 if is_rounded_later else bits
    quantization = config.quantization if isinstance(config, ModelConfig) else None
    known = kept_bytes(quantization, has_integers=dtype is torch.float32)
    if quantization is not None and known is None and quantization.rounds_activations and dtype is torch.float32:
        bits = bits or 8
    is_narrow = isinstance(config, ModelConfig) and (config.dtype in ("bfloat16", "float16") or quantization)
    if device.type == "cpu" and is_narrow:
        kept = torch.bfloat16  # of 16 bits, as stored: the kernels of a CPU multiply them with float32 activations
    least_bits: float = 8 if isinstance(bits, str) else bits or 8 * kept.itemsize
    if quantization is not None and not bits:
        least_bits = LEAST_QUANTIZED_BITS
    needed = int(config.least_weight_bytes(kept) * least_bits / (8 * kept.itemsize))
    if known is not None:
        needed = known
    free = devices.free_memory(device)
    if device.type == "cuda":  # each rank has a GPU of its own
        needed //= ranks
    if needed > free:
        where = "GPU" if device.type == "cuda" else "machine"
        narrower = ", take --dtype bfloat16 or float16" if kept.itemsize > 2 and not bits else ""
        can_round = device.type == "cpu" and quantization is None and not is_rounded_later
        narrower += ", take --quantization int4" if can_round and bits != 4 else ""
        types = (
            quantization.label
            if quantization is not None and known is not None
            else str(bits)
            if isinstance(bits, str)
            else f"int{bits}"
            if bits
            else str(kept)[6:]
        )
        raise StartError(
            f"{path}: its weights take {needed / GIB:.2f} GiB as {types}, and {free / GIB:.2f} GiB of the "
            f"{where}'s memory are free: end what else uses it{narrower}, or take a smaller model or a larger {where}"
        )
