"""Where the model runs: the device, the type of its numbers, the operations, and the memory that a cache may take."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quire import kernels
from quire.shared.errors import StartError
from quire.worker.device.graph_capture import measure_graphs, release
from quire.worker.device.memory import available_memory
from quire.worker.engine.limits import EngineLimits
from quire.worker.models.batch import ForwardBatch
from quire.worker.models.config import ModelConfig
from quire.worker.models.sharding import NotDivisible, Shard
from quire.worker.models.transformers_config import TransformersConfig
from quire.worker.ranks.leader import reason, recorder
from quire.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from quire.worker.models.paged import PagedModel

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Compute capabilities from which on a GPU computes in bfloat16, and converts 8-bit floats.
BFLOAT16_SINCE, FP8_SINCE = (8, 0), (8, 9)
# What --max-num-seqs 0 and --max-num-batched-tokens 0 stand for.
CPU_SEQUENCES, CPU_TOKENS = 64, 256
CUDA_SEQUENCES, CUDA_TOKENS = 256, 8192
# The token budget is not cut below this where memory is short.
LEAST_TOKENS = 256


def choose_device(name: str) -> torch.device:
    """The device of --device; `auto` is a CUDA device where there is one. Raises StartError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise StartError(
            "--device cuda: the installed torch computes on CPUs only; install its CUDA build, or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise StartError(
            "--device cuda: torch finds no CUDA device; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of --dtype. `auto` is bfloat16 if the device supports it, else the next best.

    Raises StartError.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        has_bfloat16 = capability >= BFLOAT16_SINCE
        if name == "bfloat16" and not has_bfloat16:
            raise StartError(
                f"--dtype bfloat16 needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}; use "
                "--dtype float16"
            )
        return DTYPES.get(name, torch.bfloat16 if has_bfloat16 else torch.float16)
    if name == "float16":
        raise StartError("--dtype float16 is for GPUs: on a CPU use --dtype bfloat16 or float32, or auto")
    if name != "auto":
        return DTYPES[name]
    try:
        kernels.CpuOps(torch.bfloat16)
        return torch.bfloat16
    except kernels.KernelsUnavailable:
        return torch.float32


def has_fp8(device: torch.device) -> bool:
    """Whether a CUDA device converts 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= FP8_SINCE


def make_ops(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> kernels.Ops:
    """The operations of --kernels for a device. Raises StartError."""
    prefer, is_cuda = settings.kernels, device.type == "cuda"
    if is_cuda != (prefer == "triton") and prefer in ("cpu", "triton"):
        raise StartError(f"--kernels {prefer} do not run on the {device.type} device; use --kernels auto")
    if settings.batch_invariant and prefer == "reference":
        raise StartError("--batch-invariant: the reference kernels are not; use --kernels auto")
    if settings.kv_cache_dtype == "fp8":
        if not is_cuda:
            raise StartError("--kv-cache-dtype fp8 needs a CUDA device; use --kv-cache-dtype auto")
        if not has_fp8(device):
            raise StartError("--kv-cache-dtype fp8 needs compute capability 8.9 or higher; use --kv-cache-dtype auto")
    if is_cuda and prefer != "reference" and (fault := kernels.outdated_triton()):
        raise StartError(f"--kernels {prefer}: {fault}; --kernels reference computes with torch")
    try:
        if is_cuda and prefer != "reference":
            return kernels.triton_ops(device, dtype, settings.kv_cache_dtype == "fp8", settings.batch_invariant)
        return kernels.select_ops(str(device), dtype, prefer)
    except kernels.KernelsUnavailable as error:
        raise StartError(f"--kernels {prefer}: {error}; --kernels reference computes with torch") from error


def check_ranks(settings: WorkerSettings, device: torch.device, config: ModelConfig | TransformersConfig) -> None:
    """Raise StartError where --tensor-parallel-size ranks cannot share the model, or have no GPU each."""
    size = settings.tensor_parallel_size
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise StartError(
            f"--tensor-parallel-size {size} needs as many GPUs, and there are {torch.cuda.device_count()}: see "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or lower it"
        )
    if isinstance(config, TransformersConfig):
        if size > 1:
            raise StartError(
                f"--tensor-parallel-size {size}: {config.architecture} is computed by Transformers, by one process; "
                "lower it to 1, or give a model that Quire's own decoder knows (docs/quickstart.md)"
            )
        return
    try:
        Shard(config, 0, size)
    except NotDivisible as error:
        raise StartError(f"--tensor-parallel-size {size}: {error}") from error


def set_threads(settings: WorkerSettings, ops: kernels.Ops) -> int:
    """How many threads compute in this process: the ranks of a worker share out what it may have."""
    threads = settings.threads or len(os.sched_getaffinity(0))
    threads = max(1, threads // settings.tensor_parallel_size)
    torch.set_num_threads(threads)
    if isinstance(ops, kernels.CpuOps):
        kernels.set_num_threads(threads)
    return threads


def kernels_of(ops: kernels.Ops) -> str:
    """Which kernels these are; on a CPU also by which instructions they multiply."""
    if isinstance(ops, kernels.CpuOps):
        return f"{ops.name}-{ops.level.name}"
    return f"{ops.name}-invariant" if ops.device.type == "cuda" and ops.row_invariant else ops.name


def arithmetic(model: PagedModel, ranks: int = 1) -> dict[str, str]:
    """What decides the last bits of a result, as labels: workers that differ in it may choose another token."""
    ops = model.ops
    is_cuda = ops.device.type == "cuda"
    return {
        "model_impl": model.implementation,
        "dtype": str(ops.dtype)[6:],
        "cache_dtype": str(getattr(ops, "kv_dtype", ops.dtype))[6:],
        "kernels": kernels_of(ops),
        "device": torch.cuda.get_device_properties(ops.device).name if is_cuda else "CPU",
        "tensor_parallel_size": str(ranks),
    }


def free_memory(device: torch.device) -> int:
    """Bytes that are free where the model runs."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def max_num_seqs(settings: WorkerSettings, device: torch.device) -> int:
    return settings.max_num_seqs or (CUDA_SEQUENCES if device.type == "cuda" else CPU_SEQUENCES)


def max_num_batched_tokens(settings: WorkerSettings, device: torch.device) -> int:
    chosen = CUDA_TOKENS if device.type == "cuda" else CPU_TOKENS
    return settings.max_num_batched_tokens or max(chosen, max_num_seqs(settings, device))


def takes_graphs(settings: WorkerSettings) -> bool:
    """Whether steps on a GPU are replayed as graphs. Not with reference kernels, which look at values."""
    return settings.cuda_graphs and settings.kernels != "reference"


def measure_step(model: PagedModel, num_tokens: int, num_rows: int, max_model_len: int, block_size: int) -> int:
    """Bytes of device memory that the largest step takes beside weights and cache: measured by running it.

    `num_tokens` of prompts whose keys go nowhere, and logits and a draw for `num_rows` of them.
    """
    device = model.ops.device
    cache = model.alloc_kv_cache(1, block_size)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        logits = model.forward(_prompts(num_tokens, num_rows, max_model_len, block_size).to(device), cache)
        ones = torch.ones(len(logits), device=device)
        zeros = torch.zeros(len(logits), dtype=torch.int32, device=device)
        model.ops.sample(logits, ones, zeros, ones, ones * 0, ones.double() * 0.5)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _prompts(num_tokens: int, num_rows: int, longest: int, block_size: int) -> ForwardBatch:
    """Prompts as long as they may be, one after the other."""
    lengths = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int32),
        block_tables=torch.zeros(len(lengths), -(-max(lengths) // block_size), dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=starts.to(torch.int32),
        logits_rows=torch.arange(min(num_rows, num_tokens)),
    )


def raise_in_one_line(error: Exception) -> None:
    """Raise StartError if the error is Triton's, on any rank: kernel, cause and remedy. Else return."""
    if failure := kernels.triton_failure(reason(error)):
        raise StartError(f"{failure}; or take --kernels reference, which computes with torch") from error


class CudaMemory(NamedTuple):
    """cache: bytes for it, within --gpu-memory-utilization; most: bytes that it could have beyond that, with all that
    is free. tokens: the token budget of a step."""

    cache: int
    most: int
    tokens: int


def plan_cuda_memory(settings: WorkerSettings, model: PagedModel, max_model_len: int) -> CudaMemory:
    """What weights, the largest step, CUDA graphs and other processes leave. The budget of a step is halved until the
    largest step fits; not with several ranks, which are out of step then."""
    device = model.ops.device
    tokens, rows = max_num_batched_tokens(settings, device), max_num_seqs(settings, device)
    log.info("running the largest step once, to measure it; the first start on a machine compiles kernels for a while")
    while True:
        release()  # what was here before, or did not fit: nothing can be released where that is caught
        try:
            step = measure_step(model, tokens, rows, max_model_len, settings.block_size)
            break
        except torch.OutOfMemoryError:
            if tokens // 2 < max(LEAST_TOKENS, rows):
                raise StartError(
                    f"a step of {tokens} tokens does not fit into the device's memory beside the weights: lower "
                    "--max-num-batched-tokens and --max-num-seqs, or take a smaller model"
                ) from None
            tokens //= 2
            log.warning("out of device memory: the token budget of a step is now %d", tokens)
        except Exception as error:  # the first launch of most kernels
            raise_in_one_line(error)
            raise
    graphs = 0
    if takes_graphs(settings):
        limits = EngineLimits(1, settings.block_size, rows, tokens, max_model_len)
        graphs = measure_graphs(model, limits, recorder(model))
    free, total = model.least_free_memory(), torch.cuda.mem_get_info(device)[1]
    room = free - (total - int(total * settings.gpu_memory_utilization))
    sizes = (free / 2**30, total / 2**30, step / 2**30, graphs / 2**30)
    log.info("device memory: %.1f of %.1f GiB free, largest step %.2f GiB, CUDA graphs %.2f GiB", *sizes)
    taken = step + graphs
    return CudaMemory(max(0, room - taken), max(0, free - taken), tokens)


def describe(device: torch.device) -> str:
    """The device, for the log."""
    if device.type == "cpu":
        return "CPU"
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
