"""The backend of a model: its operations, their threads, and the labels that describe its arithmetic."""

from __future__ import annotations

import os

import torch

from quire import kernels
from quire.worker.device import devices
from quire.worker.errors import WorkerStartError
from quire.worker.models.paged import PagedModel
from quire.worker.settings import WorkerSettings


def make_ops(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> kernels.Ops:
    """Return the operations of --kernels for a device. Raises WorkerStartError."""
    prefer, is_cuda = settings.kernels, device.type == "cuda"
    if is_cuda != (prefer == "triton") and prefer in ("cpu", "triton"):
        raise WorkerStartError(f"--kernels {prefer} do not run on the {device.type} device; use --kernels auto")
    if settings.batch_invariant and prefer == "reference":
        raise WorkerStartError("--batch-invariant: the reference kernels are not; use --kernels auto")
    if settings.kv_cache_dtype == "fp8":
        if not is_cuda:
            raise WorkerStartError("--kv-cache-dtype fp8 needs a CUDA device; use --kv-cache-dtype auto")
        if not devices.has_fp8(device):
            raise WorkerStartError(
                "--kv-cache-dtype fp8 needs compute capability 8.9 or higher; use --kv-cache-dtype auto"
            )
    if is_cuda and prefer != "reference" and (fault := kernels.outdated_triton()):
        raise WorkerStartError(f"--kernels {prefer}: {fault}; --kernels reference computes with torch")
    try:
        if is_cuda and prefer != "reference":
            return kernels.triton_ops(device, dtype, settings.kv_cache_dtype == "fp8", settings.batch_invariant)
        return kernels.select_ops(str(device), dtype, prefer)
    except kernels.KernelsUnavailable as error:
        raise WorkerStartError(f"--kernels {prefer}: {error}; --kernels reference computes with torch") from error


def set_threads(settings: WorkerSettings, ops: kernels.Ops) -> int:
    """Set the number of compute threads of this process, and return it. The ranks of a worker share --threads."""
    threads = settings.threads or len(os.sched_getaffinity(0))
    threads = max(1, threads // settings.tensor_parallel_size)
    torch.set_num_threads(threads)
    if isinstance(ops, kernels.CpuOps):
        kernels.set_num_threads(threads)
    return threads


def kernels_name(ops: kernels.Ops) -> str:
    """Return the name of the kernels; for the C++ kernels also the instructions that they use for matrix products."""
    if isinstance(ops, kernels.CpuOps):
        return f"{ops.name}-{ops.level.name}"
    return f"{ops.name}-invariant" if ops.device.type == "cuda" and ops.row_invariant else ops.name


def arithmetic_labels(model: PagedModel, ranks: int = 1) -> dict[str, str]:
    """Return what determines the last bits of results, as labels. Workers with different labels may choose other
    tokens.

    ranks: the number of tensor-parallel ranks.
    """
    ops = model.ops
    is_cuda = ops.device.type == "cuda"
    return {
        "model_impl": model.implementation,
        "dtype": str(ops.dtype)[6:],
        "cache_dtype": str(ops.kv_dtype)[6:],
        "kernels": kernels_name(ops),
        "device": torch.cuda.get_device_properties(ops.device).name if is_cuda else "CPU",
        "tensor_parallel_size": str(ranks),
    }
