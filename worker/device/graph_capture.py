"""CUDA graphs at start: for which shapes, how much memory they take, and capturing them before the worker is ready.

A capture waits for the device, so none happens while requests run. The worker captures all graphs before it is ready,
for CAPTURE_S at most; an idle engine goes on with what is left (`Engine.prepare`), one at a time.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quire.worker.device.device_runner import DeviceRunner
from quire.worker.device.graphs import DRAWN, GREEDY, MIXED, GraphBucket, Record, record_on_cuda
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits

if TYPE_CHECKING:
    from quire.worker.engine.engine import Engine
    from quire.worker.models.paged import PagedModel

log = logging.getLogger(__name__)

# Steps of more tokens keep the device busy for longer than their launch takes, and have no graph.
MOST_TOKENS = 8192
# Captures of a measurement. The first ones, one of each kind, load kernels too, and make the pool that all share.
FIRST, MEASURED = 3, 6
# Seconds before the worker is ready; and between two lines of the log.
CAPTURE_S, SAY_S = 15.0, 2.0


def graph_rooms(sequences: int, tokens: int) -> list[GraphBucket]:
    """The shapes that graphs are captured for: close together where padding would cost most.

    sequences, tokens: what a step has at most. A graph of a mixed step has more tokens than sequences, since one of
    no more tokens than sequences would be taken for decoding alone (kernels/gpu/attention.py).
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
    """Bytes of device memory that a runner and all its graphs take beside weights and cache.

    Measured with those that are captured first: the FIRST take the memory that all share, and each that was not
    captured as much as the mean of those behind them, which is what the driver keeps of a graph.
    """
    device = model.ops.device
    # A cache of one block: what the kernels find there does not matter.
    limits = replace(limits, num_blocks=1, num_host_blocks=0)
    rooms = graph_rooms(limits.max_num_seqs, limits.max_num_batched_tokens)
    release()
    free = [torch.cuda.mem_get_info(device)[0]]
    runner = DeviceRunner(model, limits, InputBatch(limits), rooms, record)
    while len(free) <= MEASURED and runner.capture_next():
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])
    del runner
    release()
    taken, captured = max(0, free[0] - free[-1]), len(free) - 1
    if captured > FIRST:
        taken += max(0, free[FIRST] - free[-1]) * (len(rooms) - captured) // (captured - FIRST)
    return taken


def release() -> None:
    """Give the device what nobody refers to any more; a runner and its graphs refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


def capture_graphs(engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
    """Capture graphs for CAPTURE_S at most, and say how it goes."""
    runner = engine.runner
    if not isinstance(runner, DeviceRunner) or not runner.graphs.num_missing:
        return
    count, device = runner.graphs.num_missing, runner.device
    release()
    free = torch.cuda.mem_get_info(device)[0]
    started = said = clock()
    while clock() - started < CAPTURE_S and engine.prepare():
        if clock() - said >= SAY_S:
            said = clock()
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
