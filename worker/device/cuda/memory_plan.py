"""The memory plan: device memory for steps and CUDA graphs, and the rest for the KV cache."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from quire.shared.process.errors import StartError
from quire.worker.device.cuda.graph_capture import measure_graphs, release
from quire.worker.device.cuda.graphs import Record, record_on_cuda
from quire.worker.device.devices import max_num_batched_tokens, max_num_seqs, uses_graphs
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.limits import MAX_SCORED_POSITIONS, EngineLimits
from quire.worker.engine.paged_model import IMAGE_SHARE, PagedModel
from quire.worker.engine.runner import NOWHERE
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# If memory is short, the token budget is not reduced below this.
LEAST_TOKENS = 256


def reserve_workspace(device: torch.device, dtype: torch.dtype) -> None:
    """Let torch allocate the cuBLAS workspace of the engine's thread, so that measured memory includes it.

    Torch gives each thread that multiplies a cuBLAS handle, and each handle a workspace (32 MiB on Hopper). The thread
    of the start has one; the engine's thread, which starts later, gets that of a thread that has ended.
    """

    def multiply() -> None:
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        torch.addmm(ones[0], ones, torch.mm(ones, ones))
        torch.cuda.synchronize(device)

    with ThreadPoolExecutor(1, thread_name_prefix="workspace") as thread:
        thread.submit(multiply).result()


def measure_step(model: PagedModel, num_tokens: int, num_rows: int, max_model_len: int, block_size: int) -> int:
    """Run the largest step. Returns the bytes of device memory that it takes in addition to weights and cache.

    The step has `num_tokens` tokens of prompts, whose K and V are not written, and samples `num_rows` of them.
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
    """Return a batch of prompts of at most `longest` tokens each."""
    lengths = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        slot_mapping=torch.full((num_tokens,), NOWHERE, dtype=torch.int32),
        block_tables=torch.zeros(len(lengths), -(-max(lengths) // block_size), dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=starts.to(torch.int32),
        logits_rows=torch.arange(min(num_rows, num_tokens)),
    )


class CudaMemory(NamedTuple):
    """The memory of a CUDA device that is left for the KV cache, and the token budget of a step."""

    cache: int  # bytes, within --gpu-memory-utilization
    most: int  # bytes, if the cache took all free memory
    tokens: int


def plan_cuda_memory(
    settings: WorkerSettings, model: PagedModel, max_model_len: int, record: Record = record_on_cuda
) -> CudaMemory:
    """Measure what weights, the largest step, CUDA graphs and other processes leave for the KV cache.

    The token budget is halved until the largest step fits. With several ranks that is not possible: a step that fails
    on one rank raises OutOfStep. record: how the model's CUDA graphs are recorded. Raises StartError.
    """
    device = model.ops.device
    tokens, rows = max_num_batched_tokens(settings, device), max_num_seqs(settings, device)
    reserve_workspace(device, model.ops.dtype)
    log.info("running the largest step once, to measure it; the first start on a machine compiles kernels for a while")
    while True:
        release()  # not in the except block, where the error's traceback still holds the memory of the failed step
        try:
            step = measure_step(model, tokens, rows + MAX_SCORED_POSITIONS, max_model_len, settings.block_size)
            break
        except torch.OutOfMemoryError:
            if tokens // 2 < max(LEAST_TOKENS, rows):
                raise StartError(
                    f"a step of {tokens} tokens does not fit into the device's memory beside the weights: lower "
                    "--max-num-batched-tokens and --max-num-seqs, or take a smaller model"
                ) from None
            tokens //= 2
            log.warning("out of device memory: the token budget of a step is now %d", tokens)
    graphs = 0
    if uses_graphs(settings):
        limits = EngineLimits(1, settings.block_size, rows, tokens, max_model_len)
        graphs = measure_graphs(model, limits, record)
    least, total = model.least_free_memory(), torch.cuda.mem_get_info(device)[1]
    free = least - min(model.image_bytes, least // IMAGE_SHARE)
    budget = free - (total - int(total * settings.gpu_memory_utilization))
    log.info(
        "device memory: %.1f of %.1f GiB free, largest step %.2f GiB, CUDA graphs %.2f GiB",
        free / 2**30,
        total / 2**30,
        step / 2**30,
        graphs / 2**30,
    )
    return CudaMemory(max(0, budget - step - graphs), max(0, free - step - graphs), tokens)
