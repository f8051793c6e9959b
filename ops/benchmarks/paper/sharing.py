"""Figure 15: how much memory sharing saves, measured on real runs of the demo model.

Saved is 1 - distinct blocks / entries of all block tables, after each step, averaged over the steps in which the engine
was full: requests follow each other, a fixed number at a time, and neither the beginning of the run, until as many have
ended, nor its tail, when no more come, is counted. Prompts are pieces of the demo model's own text; parallel sequences
are drawn at temperature 1, beams are those of its real probabilities. Outputs have their traced lengths (`ignore_eos`).
The demo model's context is 1,024 tokens, half of the paper's: the ShareGPT lengths are clamped there, and scaled so
that the means stay as published.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from quire import kernels
from quire.ops.benchmarks.paper import published
from quire.ops.benchmarks.paper.context import Context
from quire.ops.benchmarks.paper.measured import load_from, make_engine
from quire.ops.benchmarks.paper.report import table
from quire.ops.benchmarks.paper.workloads import TRACES, lengths
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.offline import generate

DEMO = PROJECT_ROOT / DEFAULT_MODEL
AT_ONCE = 8
METHODS = ("parallel sampling", "beam search")
COUNTS = (2, 4, 6)
REQUESTS = {"Alpaca": 80, "ShareGPT": 40}


def measure(job: tuple[str, str, int, int, int, list[list[int]]]) -> dict[str, Any]:
    """Measure a trace with a decoding method: (trace, method, sequences per request, requests, seed, text)."""
    trace, method, count, requests, seed, text = job
    if kernels.num_threads() > 1:
        kernels.set_num_threads(1)
    model = load_from(DEMO)
    context = model.max_model_len
    engine = make_engine(model, AT_ONCE * count * context, max_num_seqs=AT_ONCE * count)
    pairs = lengths(TRACES[trace], 4000, seed, context)[:requests]
    waiting = _requests(pairs, method, count, text, seed)
    shares = []
    ended = 0
    while True:
        for request in islice(waiting, AT_ONCE - len(engine.requests)):
            engine.add(request)
        if len(engine.requests) < AT_ONCE:
            break
        ended += sum(item.outcome is not None for item in engine.step())
        if ended >= AT_ONCE and (share := saved(engine)) is not None:
            shares.append(share)
    return {
        "trace": trace,
        "method": method,
        "sequences": count,
        "saved": 100 * float(np.mean(shares)),
        "steps": len(shares),
        "requests": requests,
        "mean_prompt": float(np.mean([prompt for prompt, _ in pairs])),
        "mean_output": float(np.mean([output for _, output in pairs])),
        "paper": published.SAVED[trace][method][count],
    }


def saved(engine: Engine) -> float | None:
    """Return the share of the block-table entries that sharing saves at the moment; None if no sequence has blocks."""
    tables = [sequence.block_table for group in engine.requests.values() for sequence in group.sequences]
    entries = sum(map(len, tables))
    return 1 - len({block for block_table in tables for block in block_table}) / entries if entries else None


def _requests(
    pairs: list[tuple[int, int]], method: str, count: int, text: list[list[int]], seed: int
) -> Iterator[GenerationRequest]:
    random = np.random.default_rng([seed, 6])
    for index, (prompt, output) in enumerate(pairs):
        page = text[random.integers(len(text))]
        prompt = min(prompt, len(page))
        first = int(random.integers(len(page) - prompt + 1))
        how = {"n": count, "temperature": 1.0} if method == METHODS[0] else {"beam_width": count}
        params = SamplingParams(output, seed=index, ignore_eos=True, **how)
        yield GenerationRequest(str(index), "demo", tuple(page[first : first + prompt]), params)


def demo_text(pages: int, tokens: int, seed: int) -> list[list[int]]:
    """Return pages of token ids that the demo model samples."""
    model = load_from(DEMO)
    engine = make_engine(model, pages * (tokens + 16), max_num_seqs=pages)
    params = [SamplingParams(tokens, seed=seed + page, ignore_eos=True) for page in range(pages)]
    return [choices[0] for choices in generate(engine, [(1,)] * pages, params)]


def run_sharing(context: Context) -> dict[str, Any]:
    context.say("writing prompts")
    text = demo_text(4 if context.quick else 16, 120 if context.quick else 600, context.seed)
    traces = ("Alpaca",) if context.quick else ("ShareGPT", "Alpaca")
    jobs = [
        (trace, method, count, 24 if context.quick else REQUESTS[trace], context.seed, text)
        for trace in traces
        for method in METHODS
        for count in reversed(COUNTS)
    ]
    rows = context.map(measure, jobs)
    order = {trace: index for index, trace in enumerate(published.SAVED)}
    rows.sort(key=lambda row: (order[row["trace"]], METHODS.index(row["method"]), row["sequences"]))
    return {"model": "models/demo", "rows": rows}


def sharing_table(result: dict[str, Any]) -> str:
    rows = [
        [
            row["trace"],
            row["method"],
            row["sequences"],
            row["saved"],
            row["paper"],
            row["mean_prompt"],
            row["mean_output"],
        ]
        for row in result["rows"]
    ]
    return table(
        "Figure 15: blocks saved by sharing, percent (demo model, real steps)",
        ["trace", "method", "sequences", "ours", "paper", "mean prompt", "mean output"],
        rows,
    )
