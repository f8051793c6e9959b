"""CUDA graphs at start: which buckets there are, how much memory they take, and their capture before readiness.

A capture waits for the device, so no graph is captured while requests run. The worker captures graphs for at most
CAPTURE_S before it is ready; an idle engine captures the rest one by one (`Engine.prepare`).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quire.worker.device.cuda.graphs import DRAWN, GREEDY, MIXED, GraphBucket, Record, record_on_cuda
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits

if TYPE_CHECKING:
    from quire.worker.engine.engine import Engine
    from quire.worker.engine.paged_model import PagedModel

log = logging.getLogger(__name__)

# Larger steps have no graph: the device computes for longer than their launch takes.
MOST_TOKENS = 8192
# Captures of `measure_graphs`. The FIRST captures, one of each kind, also load kernels and create the shared pool.
FIRST, MEASURED = 3, 6
# Time limit for captures before the worker is ready; and time between two lines of the log.
CAPTURE_S, LOG_S = 15.0, 2.0


def graph_buckets(sequences: int, tokens: int) -> list[GraphBucket]:
    """Return the buckets of all graphs. Small buckets are close together, because padding costs most there.

    sequences, tokens: the limits of a step. A graph of a mixed step has more tokens than sequences, because the
    attention kernels take a batch with no more tokens than sequences for decodes (kernels/gpu/attention.py).
    """
    decodes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4097, 32)]
    decodes = [*(size for size in decodes if size < sequences), sequences]
    mixed = [16, 32, *range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256), *range(2048, 4096, 512)]
    mixed = sorted({*mixed, *range(4096, MOST_TOKENS + 1, 1024), tokens})
    return [
        *(GraphBucket(kind, size, size) for kind in (GREEDY, DRAWN) for size in decodes),
        *(GraphBucket(MIXED, size, min(sequences, size - 1)) for size in mixed if 1 < size <= min(tokens, MOST_TOKENS)),
    ]


def measure_graphs(model: PagedModel, limits: EngineLimits, record: Record = record_on_cuda) -> int:
    """Return the bytes of device memory that a runner and all its graphs take in addition to weights and cache.

    The first MEASURED graphs are captured. The FIRST of these take the memory that all graphs share; the mean of the
    others is what the driver keeps for a graph, and counts for each graph that is not captured here.
    """
    device = model.ops.device
    # One block is enough, since the contents of the cache do not matter here.
    limits = replace(limits, num_blocks=1, num_host_blocks=0)
    buckets = graph_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
    release()
    free = [torch.cuda.mem_get_info(device)[0]]
    runner = DeviceRunner(model, limits, InputBatch(limits), buckets, record)
    while len(free) <= MEASURED and runner.capture_next():
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])
    del runner
    release()
    taken, captured = max(0, free[0] - free[-1]), len(free) - 1
    if captured > FIRST:
        taken += max(0, free[FIRST] - free[-1]) * (len(buckets) - captured) // (captured - FIRST)
    return taken


def release() -> None:
    """Free unreferenced device memory.

    A runner and its graphs form a reference cycle, so this collects garbage first.
    """
    gc.collect()
    torch.cuda.empty_cache()


def capture_graphs(engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
    """Capture graphs for at most CAPTURE_S, and log the progress."""
    runner = engine.runner
    if not isinstance(runner, DeviceRunner) or not runner.graphs.num_missing:
        return
    count, device = runner.graphs.num_missing, runner.device
    release()
    free = torch.cuda.mem_get_info(device)[0]
    started = logged = clock()
    while clock() - started < CAPTURE_S and engine.prepare():
        if clock() - logged >= LOG_S:
            logged = clock()
            log.info("captured %d of %d CUDA graphs", runner.graphs.num_captured, count)
    release()
    taken = free - torch.cuda.mem_get_info(device)[0]
    log.info(
        "captured %d of %d CUDA graphs in %.1f s, %.2f GiB%s",
        runner.graphs.num_captured,
        count,
        clock() - started,
        taken / 2**30,
        "; the rest follow while nothing runs" if runner.graphs.num_missing else "",
    )
