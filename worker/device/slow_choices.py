"""Explicit choices of the user that are slow: one line for each at start, with the flag and the faster choice.

docs/benchmarks.md has the figures, of CPUs; no line is said for GPUs, where nothing was measured.
"""

from __future__ import annotations

import torch

from quire import kernels
from quire.kernels.weights import FP8
from quire.worker.device.backend import NARROW
from quire.worker.settings import WorkerSettings

AMX = "amx"  # the level with products of AMX in bfloat16


def slow_choices(settings: WorkerSettings, ops: kernels.Ops, stored: str | None, has_integers: bool) -> list[str]:
    """Return a line for each setting that names something slower than another setting would be.

    stored: the type of the weights that the checkpoint declares. has_integers: products of the weights are those of
    integers, whose activations are float32 on every processor.
    """
    if ops.device.type != "cpu":
        return []
    lines = []
    if settings.kernels == "reference" and _has_cpu_kernels(ops.dtype):
        lines.append("--kernels reference is slow: plain torch computes; --kernels auto takes the C++ kernels")
    if settings.dtype == "float32" and stored in NARROW:
        if not has_integers and _has_cpu_kernels(torch.bfloat16):
            lines.append(
                f"--dtype float32 is slow here: the weights are {stored}, and this processor has products in bfloat16; "
                "--dtype auto takes them"
            )
        elif settings.kv_cache_dtype == "auto":
            lines.append(
                f"--dtype float32 keeps the KV cache in float32, which is slow: the weights are {stored}; --dtype auto "
                "keeps the cache in bfloat16 and computes in float32 as well"
            )
    if settings.kv_cache_dtype == "int8" and isinstance(ops, kernels.CpuOps) and ops.level.name == AMX:
        lines.append(
            "--kv-cache-dtype int8 saves memory and is slow here: keys and values are converted for each product; "
            "--kv-cache-dtype auto keeps them in bfloat16"
        )
    if settings.quantization == FP8:
        lines.append(
            "--quantization fp8 saves memory and is not fast: no CPU product takes FP8, so weights are expanded in "
            "each one; --quantization int8 is faster, and rounds activations to 8 bits"
        )
    return lines


def _has_cpu_kernels(dtype: torch.dtype) -> bool:
    """Return whether the C++ kernels compute with activations of this type here."""
    try:
        kernels.CpuOps(dtype)
    except kernels.KernelsUnavailable:
        return False
    return True
