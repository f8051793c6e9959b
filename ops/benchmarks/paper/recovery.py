"""Figure 19: swap or recompute. Both are measured on this machine, on the random checkpoint of the published shape.

Left: bringing back one sequence of N tokens, by block size: its blocks to host memory and back, or one prefill. Right:
a whole trace on a cache that is too small for it, with `preemption` swap and recompute.

The paper's GPU moves blocks over PCIe, many small transfers. Here host memory is the memory of the cache, so that
swapping is a copy: the paper's result for small blocks cannot appear, and its result for recomputation is reversed.
"""

from __future__ import annotations

import time
from typing import Any

from quire.ops.benchmarks.paper.context import Context
from quire.ops.benchmarks.paper.measured import load, make_engine, time_prefill
from quire.ops.benchmarks.paper.report import table
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.models.native.decoder import Decoder

SIZES = (8, 16, 32, 64, 128)
MODES = ("swap", "recompute")
TOKENS = 256
REPEAT = 5
END_TO_END_SIZES = (16, 64)
# Requests, prompt and output tokens, and the part of their memory that there is.
TRACE = (10, 48, 32)
SHORTAGE = 0.55


def swap_seconds(model: Decoder, tokens: int, block_size: int) -> float:
    """Swap the blocks of a sequence out and in. Return the shortest of several times."""
    count = -(-tokens // block_size)
    cache = model.alloc_kv_cache(count, block_size, count)
    blocks = list(range(count))
    best = float("inf")
    for _ in range(REPEAT):
        started = time.perf_counter()
        cache.swap_out(blocks, blocks)
        cache.swap_in(blocks, blocks)
        best = min(best, time.perf_counter() - started)
    return best


def end_to_end(model: Decoder, block_size: int, mode: str) -> dict[str, Any]:
    """Serve requests that all arrive at once, with a cache of SHORTAGE of the memory that they need."""
    requests, prompt, output = TRACE
    # Lengths differ, so that sequences need blocks and end at different times.
    pairs = [(prompt + 5 * index, output + 3 * index) for index in range(requests)]
    blocks = sum(-(-(prompt_length + output_length) // block_size) for prompt_length, output_length in pairs)
    room = max(
        int(SHORTAGE * blocks),
        max(-(-(prompt_length + output_length) // block_size) for prompt_length, output_length in pairs) + 1,
    )
    engine = make_engine(model, room * block_size, block_size, requests, num_host_blocks=blocks, preemption=mode)
    for index, (prompt_length, output_length) in enumerate(pairs):
        params = SamplingParams(output_length, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(str(index), "paper", (2 + index,) * prompt_length, params))
    latencies = []
    started = time.perf_counter()
    while engine.has_work:
        for item in engine.step():
            if item.outcome is not None:
                latencies.append((time.perf_counter() - started) / pairs[int(item.request_id)][1])
    return {
        "block_size": block_size,
        "mode": mode,
        "latency": sum(latencies) / len(latencies),
        "seconds": time.perf_counter() - started,
        "preemptions": engine.groups.num_preemptions,
    }


def run_recovery(context: Context) -> dict[str, Any]:
    model = load(context)
    engine = make_engine(model, 4 * TOKENS)
    context.say("timing recomputation")
    _, recompute = time_prefill(engine, TOKENS, 0, 2 if context.quick else 3)
    micro = []
    for size in SIZES:
        context.say(f"timing swaps with blocks of {size}")
        micro.append({"block_size": size, "swap": swap_seconds(model, TOKENS, size), "recompute": recompute})
    whole = []
    for size in END_TO_END_SIZES:
        for mode in MODES:
            context.say(f"a trace that has to {mode}, with blocks of {size}")
            whole.append(end_to_end(model, size, mode))
    return {"tokens": TOKENS, "kernels": model.ops.name, "micro": micro, "rows": whole}


def recovery_table(result: dict[str, Any]) -> str:
    micro = table(
        f"Figure 19a: bringing back {result['tokens']} tokens, ms (measured, {result['kernels']} kernels, no PCIe)",
        ["block size", "swap out and in", "recompute", "recompute / swap"],
        [
            [row["block_size"], 1e3 * row["swap"], 1e3 * row["recompute"], row["recompute"] / row["swap"]]
            for row in result["micro"]
        ],
    )
    whole = table(
        "Figure 19b: a trace on a cache that is too small (measured)",
        ["block size", "preemption", "normalised latency, ms/token", "preempted", "seconds"],
        [
            [row["block_size"], row["mode"], 1e3 * row["latency"], row["preemptions"], row["seconds"]]
            for row in result["rows"]
        ],
    )
    return f"{micro}\n\n{whole}"
