"""Figures 2 and 13: the contents of the cache memory, and the number of requests that fit.

OPT-13B on an A100-40GB (15.7K slots), SIMULATION with the host of 2023; ShareGPT at 2 requests/s and Alpaca at 30/s, as
in figure 13. Averages are over the time in which requests wait, since memory is not short before that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.ops.benchmarks.paper import published
from quire.ops.benchmarks.paper.allocators import OrcaManager
from quire.ops.benchmarks.paper.context import Context
from quire.ops.benchmarks.paper.profiles import OPT_13B_2023, OPT_13B_SLOTS
from quire.ops.benchmarks.paper.report import table
from quire.ops.benchmarks.paper.simulation import ALLOCATORS, QUIRE, make_engine, simulate
from quire.ops.benchmarks.paper.workloads import TRACES, at_rate, lengths
from quire.worker.engine.engine import Engine

PARTS = ("token states", "reserved", "internal fragmentation", "external and other")
SECONDS = {"ShareGPT": 600.0, "Alpaca": 120.0}
QUICK_SECONDS = {"ShareGPT": 60.0, "Alpaca": 6.0}


@dataclass(slots=True)
class SlotUsage:
    """Observes an engine and adds up token-seconds by their use, while requests wait."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    requests: float = 0.0
    # The most empty slots of any sequence after any step.
    worst_waste: int = 0

    def __call__(self, engine: Engine, seconds: float) -> None:
        groups = engine.groups
        is_paged = not isinstance(groups.blocks, OrcaManager)
        sequences = [sequence for group in groups.running for sequence in group.sequences if sequence.row >= 0]
        if is_paged and sequences:
            size = engine.limits.block_size
            waste = max(len(sequence.block_table) * size - len(sequence.token_ids) for sequence in sequences)
            # Checks the claim of section 4.3 at every step and for every sequence.
            assert waste < size, f"a sequence wastes {waste} slots with blocks of {size}"
            self.worst_waste = max(waste, self.worst_waste)
        if not any(groups.waiting):
            return
        stored = kept = reserved = 0
        for sequence in sequences:
            final = sequence.num_prompt_tokens + sequence.group.sampling.max_tokens
            held = len(sequence.block_table) * engine.limits.block_size
            stored += sequence.num_computed
            # Allocated slots that the sequence will fill. Allocated slots after the final length stay empty.
            kept += min(held, final)
            reserved += held
        pool = engine.limits.num_blocks * engine.limits.block_size
        self.seconds += seconds
        self.requests += len(groups.running) * seconds
        for part, slots in zip(PARTS, (stored, kept - stored, reserved - kept, pool - reserved), strict=True):
            self.parts[part] += slots / pool * seconds


def measure(job: tuple[str, str, float, int]) -> dict[str, Any]:
    """Measure a trace under an allocator: (trace, allocator, seconds, seed)."""
    trace, allocator, seconds, seed = job
    rate = published.BATCHED_RATES[trace]
    requests = at_rate(lengths(TRACES[trace], round(rate * seconds), seed), rate, seed)
    usage = SlotUsage()
    engine = make_engine(allocator)
    outcome = simulate(engine, requests, OPT_13B_2023, observe=usage, until_drained=False)
    under_pressure = max(usage.seconds, 1e-9)
    return {
        "trace": trace,
        "allocator": allocator,
        "requests": len(requests),
        "parts": {part: 100 * slots / under_pressure for part, slots in usage.parts.items()},
        "worst_waste_slots": usage.worst_waste if allocator == QUIRE else None,
        "batched_while_waiting": usage.requests / usage.seconds if usage.seconds else None,
        "batched": outcome.batched,
        "preemptions": engine.groups.num_preemptions,
        "share_of_time_waiting": usage.seconds / outcome.seconds,
    }


def _run(context: Context, traces: tuple[str, ...]) -> dict[str, Any]:
    seconds = QUICK_SECONDS if context.quick else SECONDS
    jobs = [(trace, allocator, seconds[trace], context.seed) for trace in traces for allocator in ALLOCATORS]
    return {"model": OPT_13B_2023.name, "slots": OPT_13B_SLOTS, "rows": context.map(measure, jobs)}


def run_memory(context: Context) -> dict[str, Any]:
    return _run(context, ("ShareGPT",))


def run_batch(context: Context) -> dict[str, Any]:
    return _run(context, ("ShareGPT", "Alpaca"))


def memory_table(result: dict[str, Any]) -> str:
    rows = [
        [row["allocator"], *(row["parts"][part] for part in PARTS), published.EFFECTIVE_USE[row["allocator"]]]
        for row in result["rows"]
    ]
    text = table(
        "Figure 2: memory of the KV cache while requests wait, percent (ShareGPT, OPT-13B; SIMULATION)",
        ["", *PARTS, "paper: token states"],
        rows,
    )
    quire = next(row for row in result["rows"] if row["allocator"] == QUIRE)
    return f"{text}\nMost unused slots of any sequence after any step: {quire['worst_waste_slots']} of blocks of 16."


def batch_table(result: dict[str, Any]) -> str:
    rows = [
        [
            row["trace"],
            row["allocator"],
            row["batched"],
            row["batched_while_waiting"],
            published.BATCHED[row["trace"]][row["allocator"]],
            row["preemptions"] / row["requests"],
        ]
        for row in result["rows"]
    ]
    return table(
        "Figure 13: mean number of batched requests (OPT-13B, host of 2023; SIMULATION)",
        ["trace", "", "ours", "ours, while requests wait", "paper", "preemptions per request"],
        rows,
    )
