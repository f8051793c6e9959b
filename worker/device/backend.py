"""The backend of a model: its operations, their threads, and the labels that describe its arithmetic."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from quire import kernels
from quire.kernels.weights import FP8_DYNAMIC
from quire.shared.process.errors import StartError
from quire.worker.device import devices
from quire.worker.device.placement import Placement, place
from quire.worker.device.topology import Topology, read_topology
from quire.worker.engine.paged_model import PagedModel
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
NARROW = ("bfloat16", "float16")  # types of 16 bits that a checkpoint may declare


def choose_kv_dtype(
    settings: WorkerSettings, device: torch.device, dtype: torch.dtype, stored: str | None
) -> torch.dtype:
    """Return the type of the KV cache. Raises StartError if the kernels of the device have none of --kv-cache-dtype.

    dtype: of the activations. stored: the type of the weights that the checkpoint declares.
    """
    name = settings.kv_cache_dtype
    if name == "auto":
        # A CPU without 16-bit products chooses float32 for a checkpoint of 16 bits: a wider cache would only be slower.
        narrow = device.type == "cpu" and dtype is torch.float32 and settings.dtype == "auto" and stored in NARROW
        return torch.bfloat16 if narrow else dtype
    wanted = KV_DTYPES[name]
    if wanted is dtype:
        return wanted
    if device.type == "cuda":
        if name != "fp8":
            raise StartError(
                f"--kv-cache-dtype {name}: a GPU keeps the cache in the type of the activations, {str(dtype)[6:]}, or "
                "in fp8; use --kv-cache-dtype auto or fp8"
            )
        if not devices.has_fp8(device):
            raise StartError("--kv-cache-dtype fp8 needs compute capability 8.9 or higher; use --kv-cache-dtype auto")
    elif name == "float32":
        raise StartError(f"--kv-cache-dtype float32 is wider than the activations, {str(dtype)[6:]}; use auto")
    return wanted


def choose_kernels(settings: WorkerSettings, device: torch.device, dtype: torch.dtype, head_dim: int) -> WorkerSettings:
    """Return the settings with the kernels that compute heads of this size. Raises StartError if they are not to be.

    dtype: of the activations. head_dim: the largest of the model. The Triton kernels have a largest size, beyond which
    torch computes.
    """
    most = kernels.max_triton_head_dim(dtype)
    if device.type != "cuda" or settings.kernels == "reference" or head_dim <= most:
        return settings
    what = (
        f"the model has heads of {head_dim}, and the Triton kernels compute heads of up to {most} in {str(dtype)[6:]}"
    )
    if settings.kernels == "triton":
        raise StartError(f"--kernels triton: {what}; --kernels auto computes with torch")
    if settings.batch_invariant:
        raise StartError(f"--batch-invariant: {what}; serve this model without it, which computes with torch")
    log.warning("%s: torch computes, which is slower", what)
    return replace(settings, kernels="reference")


def make_ops(
    settings: WorkerSettings, device: torch.device, dtype: torch.dtype, stored: str | None = None
) -> kernels.Ops:
    """Return the operations of --kernels for a device. Raises StartError.

    stored: the type of the weights that the checkpoint declares; it affects --kv-cache-dtype auto.
    """
    prefer, is_cuda = settings.kernels, device.type == "cuda"
    if is_cuda != (prefer == "triton") and prefer in ("cpu", "triton"):
        raise StartError(f"--kernels {prefer} do not run on the {device.type} device; use --kernels auto")
    if settings.batch_invariant and prefer == "reference":
        raise StartError("--batch-invariant: the reference kernels are not; use --kernels auto")
    has_fp8_products = settings.quantization == FP8_DYNAMIC
    if has_fp8_products and prefer == "reference":  # also where torch computes because heads are too large for Triton
        raise StartError("--quantization fp8-dynamic: torch computes this model; take --quantization fp8")
    kv_dtype = choose_kv_dtype(settings, device, dtype, stored)
    if is_cuda and prefer != "reference" and (fault := kernels.outdated_triton()):
        raise StartError(f"--kernels {prefer}: {fault}; --kernels reference computes with torch")
    try:
        if is_cuda and prefer != "reference":
            has_fp8_cache = kv_dtype is torch.float8_e4m3fn
            return kernels.triton_ops(
                device, dtype, has_fp8_cache, settings.batch_invariant, has_fp8_products, settings.hopper_prefill
            )
        return kernels.select_ops(str(device), dtype, prefer, kv_dtype)
    except kernels.KernelsUnavailable as error:
        raise StartError(f"--kernels {prefer}: {error}; --kernels reference computes with torch") from error


def kv_cache_name(ops: kernels.Ops) -> str:
    """Return --kv-cache-dtype for other processes with the dtype of `ops`."""
    return next((name for name, dtype in KV_DTYPES.items() if dtype is ops.kv_dtype is not ops.dtype), "auto")


def place_threads(
    settings: WorkerSettings, ops: kernels.Ops, rank: int = 0, topology: Topology | None = None
) -> Placement:
    """Set the number of compute threads of this process and their cores, for a rank of a worker.

    Call it before the process starts other threads that are to stay on these cores. topology: by default the machine's.
    """
    placement = place(topology or read_topology(), settings.threads, settings.num_ranks, rank, settings.thread_binding)
    torch.set_num_threads(placement.threads)
    if not isinstance(ops, kernels.CpuOps):
        return placement
    kernels.set_num_threads(placement.threads)
    try:
        if placement.cpus:
            os.sched_setaffinity(0, placement.cpus)
        if placement.nodes:
            kernels.interleave_memory(placement.nodes)
    except OSError as error:
        log.warning("threads and memory stay where the system puts them: %s", error.strerror)
        return Placement(placement.threads)
    if placement.bound:
        kernels.bind_threads(placement.bound)
    return placement


def kernels_name(ops: kernels.Ops) -> str:
    """Return the name of the kernels.

    The name of the C++ kernels includes their instructions for matrix products; that of Triton, replaced kernels.
    """
    if isinstance(ops, kernels.CpuOps):
        return f"{ops.name}-{ops.level.name}"
    if isinstance(ops, kernels.ReplaceableKernels) and ops.replaced:
        return f"{ops.name}-without-{'-'.join(sorted(ops.replaced))}"
    return f"{ops.name}-invariant" if ops.device.type == "cuda" and ops.row_invariant else ops.name


def arithmetic_name(ops: kernels.Ops) -> str:
    """Return a name that kernels with equal results share: all C++ levels with float32 activations give equal bits."""
    if isinstance(ops, kernels.CpuOps) and ops.dtype is torch.float32:
        return f"{ops.name}-float32"
    return kernels_name(ops)


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
        "kernels": arithmetic_name(ops),
        "device": torch.cuda.get_device_properties(ops.device).name if is_cuda else "CPU",
        "tensor_parallel_size": str(ranks),
    }
