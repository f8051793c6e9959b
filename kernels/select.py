"""Chooses the implementation of the operations on a CPU for a dtype. `gpu/start.py` has that for a CUDA device."""

import logging

import torch

from quire.kernels.cpu.latent import CpuLatentOps
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.latent import LatentOps
from quire.kernels.ops import KernelsUnavailable, Ops
from quire.kernels.reference import ReferenceOps
from quire.kernels.reference_latent import ReferenceLatentOps

log = logging.getLogger(__name__)


def select_ops(device: str, dtype: torch.dtype, prefer: str = "auto", kv_dtype: torch.dtype | None = None) -> Ops:
    """Return the C++ kernels on a CPU, or plain torch.

    prefer: "auto" falls back to plain torch with a warning if the C++ kernels are unavailable; "cpu" requires the C++
    kernels; "reference" requires plain torch. kv_dtype: of the KV cache, `dtype` if None.
    Raises ValueError for another `prefer`, and KernelsUnavailable for "cpu" if the C++ kernels cannot run here.
    """
    if prefer not in ("auto", "cpu", "reference"):
        raise ValueError(f"prefer is {prefer!r}: it must be auto, cpu or reference")
    if prefer == "cpu" or (prefer == "auto" and torch.device(device).type == "cpu"):
        try:
            return CpuOps(dtype, kv_dtype)
        except KernelsUnavailable as error:
            if prefer == "cpu":
                raise
            log.warning("kernels: plain torch instead of the C++ kernels: %s", error)
    return ReferenceOps(device, dtype, kv_dtype)


def latent_ops(ops: Ops) -> LatentOps | None:
    """Return the operations of a latent KV cache with the types and the device of `ops`; None if it has none."""
    if isinstance(ops, CpuOps):
        return CpuLatentOps(ops)
    return ReferenceLatentOps(ops) if isinstance(ops, ReferenceOps) else None
