"""The arithmetic of the decoder, and nothing of the project: `select_ops` gives the best implementation for a device.

`kernels.ops.Ops` is the contract, `kernels.reference` its definition in plain torch, `kernels.cpu` the fast one for
x86-64, `kernels.gpu` the one in Triton for CUDA devices.
"""

import logging

import torch

from kernels.cpu import CpuOps, Unavailable, library
from kernels.ops import Ops, PackedLinear
from kernels.reference import ReferenceOps

__all__ = [
    "CpuOps",
    "Ops",
    "PackedLinear",
    "ReferenceOps",
    "Unavailable",
    "num_threads",
    "select_ops",
    "set_num_threads",
    "triton_ops",
]

log = logging.getLogger(__name__)


def select_ops(device: str, dtype: torch.dtype, prefer: str = "auto") -> Ops:
    """The fastest operations for this device and dtype. prefer: "auto", "cpu" (the C++ kernels or an error) or
    "reference"."""
    if prefer not in ("auto", "cpu", "reference"):
        raise ValueError(f"prefer is {prefer!r}: it must be auto, cpu or reference")
    if prefer == "cpu" or (prefer == "auto" and torch.device(device).type == "cpu"):
        try:
            return CpuOps(dtype)
        except Unavailable as error:
            if prefer == "cpu":
                raise
            log.warning("kernels: plain torch instead of the C++ kernels: %s", error)
    return ReferenceOps(device, dtype)


def triton_ops(device: torch.device, dtype: torch.dtype, fp8_cache: bool = False, batch_invariant: bool = False) -> Ops:
    """The Triton kernels on a CUDA device. Raises Unavailable where Triton is not installed."""
    try:
        from kernels.gpu import TritonOps
    except ImportError as error:
        raise Unavailable(f"Triton cannot be imported ({error})") from error
    kv_dtype = torch.float8_e4m3fn if fp8_cache else None
    return TritonOps(device, dtype, kv_dtype, batch_invariant=batch_invariant)


def num_threads() -> int:
    """Threads of the C++ kernels; at first as many as this process may use processors."""
    return library.load().quire_get_threads()


def set_num_threads(count: int) -> None:
    if count < 1:
        raise ValueError(f"count is {count}: it must be at least 1")
    library.load().quire_set_threads(count)
