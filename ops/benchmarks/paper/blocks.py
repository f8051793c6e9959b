"""Figure 18: the effect of the block size on decode steps of the real kernels, and on memory.

Left: one decode step of this engine on this machine (random checkpoint of the published shape), by block size. Right:
SIMULATION with OPT-13B on an A100-40GB, which computes equally fast with every block size: only the use of memory
differs, at a request rate at which memory is short.
"""

from __future__ import annotations

from typing import Any

from quire.ops.benchmarks.paper import published
from quire.ops.benchmarks.paper.context import Context
from quire.ops.benchmarks.paper.measured import load, make_engine, time_decodes
from quire.ops.benchmarks.paper.profiles import OPT_13B_2023
from quire.ops.benchmarks.paper.report import table
from quire.ops.benchmarks.paper.simulation import QUIRE, simulate
from quire.ops.benchmarks.paper.simulation import make_engine as make_simulated
from quire.ops.benchmarks.paper.workloads import TRACES, at_rate, lengths

SIZES = (8, 16, 32, 64, 128)
SIMULATED_SIZES = (1, 2, 4, *SIZES, 256)
# Requests per second, and seconds. The rate is a little higher than in figure 13 for Alpaca, so that memory is short.
LOADS = {"ShareGPT": (2.0, 400.0), "Alpaca": (34.0, 80.0)}


def simulated(job: tuple[str, int, float, int]) -> dict[str, Any]:
    """Simulate a job: (trace, block size, part of the duration, seed)."""
    trace, size, scale, seed = job
    rate, seconds = LOADS[trace]
    requests = at_rate(lengths(TRACES[trace], round(rate * seconds * scale), seed), rate, seed)
    engine = make_simulated(QUIRE, block_size=size)
    outcome = simulate(engine, requests, OPT_13B_2023)
    return {
        "trace": trace,
        "block_size": size,
        "latency": outcome.latency,
        "batched": outcome.batched,
        "preemptions": engine.groups.num_preemptions,
        "rate": rate,
    }


def run_blocks(context: Context) -> dict[str, Any]:
    model = load(context)
    sequences, tokens, repeat = (4, 64, 2) if context.quick else (16, 512, 7)
    decodes = []
    for size in SIZES:
        context.say(f"timing decode steps with blocks of {size}")
        engine = make_engine(model, sequences * (tokens + 4 * size + 16), size)
        _, seconds = time_decodes(engine, sequences, tokens, repeat)
        decodes.append({"block_size": size, "sequences": sequences, "context": tokens, "seconds": seconds})
    jobs = [(trace, size, 0.1 if context.quick else 1.0, context.seed) for trace in TRACES for size in SIMULATED_SIZES]
    return {"decodes": decodes, "kernels": model.ops.name, "rows": context.map(simulated, jobs)}


def blocks_table(result: dict[str, Any]) -> str:
    steps = {decode["block_size"]: decode["seconds"] for decode in result["decodes"]}
    by = {(row["trace"], row["block_size"]): row for row in result["rows"]}
    rows = []
    for size in SIMULATED_SIZES:
        cells: list[Any] = [size, 1e3 * steps[size] if size in steps else None]
        for trace in TRACES:
            low, high = published.BEST_BLOCK_SIZES[trace]
            cells += [1e3 * by[trace, size]["latency"], "best" if low <= size <= high else ""]
        rows.append(cells)
    first = result["decodes"][0]
    return table(
        f"Figure 18: block size (step: {first['sequences']} sequences with {first['context']} tokens, measured with "
        f"the {result['kernels']} kernels; latency: OPT-13B, SIMULATION)",
        ["block size", "decode step, ms", "ShareGPT, ms/token", "in the paper", "Alpaca, ms/token", "in the paper"],
        rows,
    )
