"""The arithmetic of the decoder, and nothing of the project: `select_ops` gives the best implementation for a device.

`ops.Ops` is the contract, `reference` its definition in plain torch, `cpu` the fast one for x86-64, `gpu` the one in
Triton for CUDA devices.
"""

import logging
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from quire.kernels.cpu import CpuOps, KernelsUnavailable, library
from quire.kernels.cuda import PinningFailed
from quire.kernels.first_calls import make_first_calls
from quire.kernels.ops import Ops, PackedLinear
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton_support import TritonFailure, outdated_triton, triton_failure

__all__ = [
    "CpuOps",
    "KernelsUnavailable",
    "Ops",
    "PackedLinear",
    "PinningFailed",
    "ReferenceOps",
    "TritonFailure",
    "num_threads",
    "outdated_triton",
    "select_ops",
    "set_num_threads",
    "triton_failure",
    "triton_ops",
]

log = logging.getLogger(__name__)

make_first_calls()  # before anything can compute on several threads


def select_ops(device: str, dtype: torch.dtype, prefer: str = "auto") -> Ops:
    """The fastest operations for this device and dtype. prefer: "auto", "cpu" (the C++ kernels or an error) or
    "reference"."""
    if prefer not in ("auto", "cpu", "reference"):
        raise ValueError(f"prefer is {prefer!r}: it must be auto, cpu or reference")
    if prefer == "cpu" or (prefer == "auto" and torch.device(device).type == "cpu"):
        try:
            return CpuOps(dtype)
        except KernelsUnavailable as error:
            if prefer == "cpu":
                raise
            log.warning("kernels: plain torch instead of the C++ kernels: %s", error)
    return ReferenceOps(device, dtype)


def triton_ops(device: torch.device, dtype: torch.dtype, fp8_cache: bool = False, batch_invariant: bool = False) -> Ops:
    """The Triton kernels on a CUDA device. Raises Unavailable where Triton is not installed, or cannot compile."""
    try:
        from quire.kernels.gpu import TritonOps
    except ImportError as error:
        raise KernelsUnavailable(f"Triton cannot be imported ({error})") from error
    kv_dtype = torch.float8_e4m3fn if fp8_cache else None
    ops = TritonOps(device, dtype, kv_dtype, batch_invariant=batch_invariant)
    try:
        ops.argmax(torch.zeros(1, 2, device=device))  # the smallest of all: now, and not in the first step
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(why_triton_fails(error)) from error
    except Exception as error:
        if (failure := triton_failure(error)) is None:
            raise
        raise KernelsUnavailable(str(failure)) from error
    return ops


def why_triton_fails(error: Exception) -> str:
    """Triton compiles what launches a kernel with the host's C compiler (`triton.runtime.build`)."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not shutil.which(compiler):
        missing = f"and CC={compiler} is none" if compiler else "and finds neither gcc nor clang"
        return f"Triton needs a C compiler {missing}: install gcc, or name one in CC"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Triton needs Python's C headers and finds no Python.h: install them (python3-dev)"
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return f"Triton cannot launch a kernel here ({reason[-1]})"


def num_threads() -> int:
    """Threads of the C++ kernels; at first as many as this process may use processors."""
    return library.load().quire_get_threads()


def set_num_threads(count: int) -> None:
    if count < 1:
        raise ValueError(f"count is {count}: it must be at least 1")
    library.load().quire_set_threads(count)
