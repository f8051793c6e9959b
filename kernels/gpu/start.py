"""Starts the Triton kernels on a CUDA device, or says why they cannot run there."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from quire.kernels.gpu.triton_support import triton_failure, use_installed_assembler
from quire.kernels.ops import KernelsUnavailable, Ops


def triton_ops(
    device: torch.device,
    dtype: torch.dtype,
    fp8_cache: bool = False,
    batch_invariant: bool = False,
    fp8_activations: bool = False,
    hopper_prefill: bool = False,
) -> Ops:
    """Return the Triton kernels for a CUDA device, after one trial launch.

    fp8_cache: keep the KV cache as float8_e4m3fn. batch_invariant, fp8_activations, hopper_prefill: see
    `quire.kernels.gpu.ops.TritonOps`.
    Raises KernelsUnavailable if Triton is not installed or cannot compile or launch a kernel here.
    """
    try:
        from quire.kernels.gpu.ops import TritonOps
    except ImportError as error:
        raise KernelsUnavailable(f"Triton cannot be imported ({error})") from error
    use_installed_assembler(torch.version.cuda)
    kv_dtype = torch.float8_e4m3fn if fp8_cache else None
    ops = TritonOps(
        device, dtype, kv_dtype, batch_invariant, fp8_activations=fp8_activations, hopper_prefill=hopper_prefill
    )
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
