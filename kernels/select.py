"""Chooses the implementation of the operations for a device and a dtype."""

import logging
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from quire.kernels.cpu.latent import CpuLatentOps
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.gpu.triton_support import triton_failure, use_installed_assembler
from quire.kernels.latent import LatentOps
from quire.kernels.ops import Ops
from quire.kernels.reference import ReferenceOps
from quire.kernels.reference_latent import ReferenceLatentOps
from quire.kernels.unavailable import KernelsUnavailable

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


def triton_ops(
    device: torch.device,
    dtype: torch.dtype,
    fp8_cache: bool = False,
    batch_invariant: bool = False,
    fp8_activations: bool = False,
) -> Ops:
    """Return the Triton kernels for a CUDA device, after one trial launch.

    fp8_cache: keep the KV cache as float8_e4m3fn. batch_invariant, fp8_activations: see
    `quire.kernels.gpu.ops.TritonOps`.
    Raises KernelsUnavailable if Triton is not installed or cannot compile or launch a kernel here.
    """
    try:
        from quire.kernels.gpu.ops import TritonOps
    except ImportError as error:
        raise KernelsUnavailable(f"Triton cannot be imported ({error})") from error
    use_installed_assembler(torch.version.cuda)
    kv_dtype = torch.float8_e4m3fn if fp8_cache else None
    ops = TritonOps(device, dtype, kv_dtype, batch_invariant=batch_invariant, fp8_activations=fp8_activations)
    try:
        ops.argmax(torch.zeros(1, 2, device=device))  # the smallest kernel: fail at start, not in the first step
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(_why_triton_fails(error)) from error
    except Exception as error:
        if (failure := triton_failure(error)) is None:
            raise
        raise KernelsUnavailable(str(failure)) from error
    return ops


def _why_triton_fails(error: Exception) -> str:
    """Return cause and remedy. Triton needs the host's C compiler to build its launcher (`triton.runtime.build`)."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not shutil.which(compiler):
        missing = f"and CC={compiler} does not exist" if compiler else "and finds neither gcc nor clang"
        return f"Triton needs a C compiler {missing}: install gcc, or set CC to a C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Triton needs Python's C headers and finds no Python.h: install them (python3-dev)"
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return f"Triton cannot launch a kernel here ({reason[-1]})"
