"""Figures 12, 14, 16 and 17: normalised latency against request rate, and the rate that each system sustains.

A trace is served at rising rates. The sustained rate is where the mean normalised latency (end-to-end seconds / output
tokens) crosses a limit, interpolated between the rates that were run. The figures of the paper end at 1 s per token,
with traces of an hour. Traces here last minutes. Beyond what a system can do its queue, and with it the latency, grows
in proportion to the length of the trace; so the same overload shows in a trace of T seconds as T / 3600 of the latency,
and the limit is: the unloaded latency + 1 s per token x T / 3600.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from quire.ops.benchmarks.paper import published
from quire.ops.benchmarks.paper.context import Context
from quire.ops.benchmarks.paper.measured import fitted_profile
from quire.ops.benchmarks.paper.profiles import OPT_13B, Profile
from quire.ops.benchmarks.paper.report import table
from quire.ops.benchmarks.paper.simulation import (
    ALLOCATORS,
    FASTER_TRANSFORMER,
    QUIRE,
    VOCAB,
    SimulationResult,
    faster_transformer,
    make_engine,
    simulate,
)
from quire.ops.benchmarks.paper.workloads import TRACES, at_rate, chatbot_lengths, lengths, prefixed_lengths
from quire.worker.pinned_prefixes import pin

ORACLE = "Orca (Oracle)"
STEP = 1.15  # between two rates that are run
MOST_RATES = 12
BACKLOG = 100


@dataclass(frozen=True)
class ThroughputCase:
    """One curve: a system, what it serves, and how fast it computes. `prefix`: shared tokens of all prompts."""

    figure: str
    system: str
    trace: str
    profile: Profile
    seconds: float
    sampling: dict[str, Any] = field(default_factory=dict)
    prefix: int = 0
    seed: int = 0

    def pairs(self, count: int) -> list[tuple[int, int]]:
        if self.trace == "chatbot":
            return chatbot_lengths(count, self.seed)
        if self.prefix:
            return prefixed_lengths(self.prefix, count, self.seed)
        return lengths(TRACES[self.trace], count, self.seed)

    @property
    def label(self) -> str:
        what = ", ".join(f"{name}={value}" for name, value in self.sampling.items())
        return ", ".join(part for part in (self.trace, what, f"prefix {self.prefix}" * bool(self.prefix)) if part)

    def serve(self, rate: float, limit: float, seconds: float, until_drained: bool = True) -> SimulationResult:
        """Serve the trace at a rate."""
        requests = at_rate(self.pairs(max(8, round(rate * seconds))), rate, self.seed)
        if self.system == FASTER_TRANSFORMER:
            return faster_transformer(requests, self.profile, limit=limit)
        # The certainty of the random logits makes beams share about as much as those of the demo model (figure 15).
        engine = make_engine(self.system, spread=BEAM_SPREAD, seed=self.seed)
        prefix = tuple(1 + i % (VOCAB - 1) for i in range(self.prefix))
        if prefix and self.system == QUIRE:
            pin(engine, "instructions", prefix)
        return simulate(engine, requests, self.profile, self.sampling, prefix, limit=limit, until_drained=until_drained)


BEAM_SPREAD = 2.0


def sustained(case: ThroughputCase) -> dict[str, Any]:
    """Return the curve of a case and its sustained rate, requests per second."""
    points: dict[float, float] = {}
    base = unloaded(case)
    limit = base + case.seconds / 3600

    def run(rate: float) -> float:
        # Continues beyond the limit, so that a point lies on each side of it.
        points[rate] = case.serve(rate, 4 * limit, case.seconds).latency
        return points[rate]

    low = high = capacity(case)
    if run(low) < limit:
        while points[high] < limit and len(points) < MOST_RATES:
            low, high = high, high * STEP
            run(high)
    else:
        while points[low] >= limit and len(points) < MOST_RATES:
            low, high = low / STEP, low
            run(low)
    for share in (0.4, 0.75):
        run(low * share)
    return {
        **{
            name: getattr(case, name) for name in ("figure", "system", "trace", "seconds", "sampling", "prefix", "seed")
        },
        "profile": case.profile.name,
        "label": case.label,
        "unloaded": base,
        "limit": limit,
        "sustained": _crossing(points, low, high, limit),
        "points": sorted([rate, latency if math.isfinite(latency) else None] for rate, latency in points.items()),
    }


def capacity(case: ThroughputCase) -> float:
    """Return a first guess of the sustained rate: requests per second that end while a backlog is served."""
    rate, count = 1e3, BACKLOG if case.trace in ("ShareGPT", "chatbot") else 4 * BACKLOG
    outcome = case.serve(rate, float("inf"), count / rate, until_drained=False)
    return len(outcome.normalised) / outcome.seconds


def _crossing(points: dict[float, float], low: float, high: float, limit: float) -> float | None:
    """Return the rate between `low` and `high` at which the latency crosses the limit, by logarithmic interpolation.

    None if the latency exceeds the limit at every rate.
    """
    if not math.isfinite(points[high]):
        return math.sqrt(low * high)
    if not points[low] < limit <= points[high]:
        return low if points[low] < limit else None
    share = math.log(limit / points[low]) / math.log(points[high] / points[low])
    return float(low * (high / low) ** share)


def unloaded(case: ThroughputCase) -> float:
    """Return the normalised latency at a rate so low that requests do not affect each other."""
    return case.serve(1e-6, float("inf"), 0.0).latency


def cases(context: Context, fitted: Profile) -> list[ThroughputCase]:
    """Return all curves, the longest runs first, so that all processes end at about the same time.

    Short runs leave out beam search (figure 14): its ratio shows in long traces only.
    """
    scale = 0.2 if context.quick else 1.0
    seed = context.seed
    result = []
    systems = (*ALLOCATORS, FASTER_TRANSFORMER)
    for trace, seconds in (("ShareGPT", 300.0), ("Alpaca", 60.0)):
        for system in systems:
            result.append(ThroughputCase("12", system, trace, OPT_13B, seconds * scale, seed=seed))
    result += [ThroughputCase("17", system, "chatbot", OPT_13B, 300 * scale, seed=seed) for system in ALLOCATORS]
    for trace, seconds in (("ShareGPT", 1200.0), ("Alpaca", 300.0)):
        for system in ALLOCATORS:
            result.append(ThroughputCase("12, fitted", system, trace, fitted, seconds * scale, seed=seed))
    for system in (QUIRE, ORACLE):
        for count in (2, 4, 6):
            result.append(ThroughputCase("14", system, "Alpaca", OPT_13B, 40 * scale, sampling={"n": count}, seed=seed))
            if not context.quick:  # a trace of 4 s ends before their ratio shows
                beam = {"beam_width": count}
                result.append(ThroughputCase("14", system, "Alpaca", OPT_13B, 20, sampling=beam, seed=seed))
        for prefix in (80, 341):
            result.append(ThroughputCase("16", system, "WMT16", OPT_13B, 60 * scale, prefix=prefix, seed=seed))
    return result


def run_throughput(context: Context) -> dict[str, Any]:
    fitted, report = fitted_profile(context)
    rows = context.map(sustained, cases(context, fitted))
    return {"fit": report, "rows": rows, "ratios": ratios(rows)}


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of Quire's sustained rate to that of every other system, with the paper's value."""
    ours = {(row["figure"], row["label"]): row["sustained"] for row in rows if row["system"] == QUIRE}
    result = []
    for row in rows:
        if row["system"] != QUIRE:
            result.append(
                {
                    "figure": row["figure"],
                    "label": row["label"],
                    "over": row["system"],
                    "rate": row["sustained"],
                    "quire": ours[row["figure"], row["label"]],
                    "ratio": ours[row["figure"], row["label"]] / row["sustained"] if row["sustained"] else None,
                    "paper": published_ratio(row),
                }
            )
    return result


def published_ratio(row: dict[str, Any]) -> str | None:
    """Return the paper's value for this comparison; None if the paper has none."""
    figure, system = row["figure"], row["system"]
    if figure == "12" and row["trace"] == "ShareGPT" and system in published.RATE_RATIOS:
        least, most = published.RATE_RATIOS[system]
        return f"up to {most:g}" if least is None else f"{least} to {most:g}"
    if system == ORACLE and row["trace"] == "Alpaca":
        if figure == "12":
            return str(published.BASIC_ALPACA_OVER_ORACLE)
        if row["sampling"].get("beam_width") == 6:
            return str(published.SIX_BEAMS_OVER_ORACLE)
    if figure == "16":
        return str(published.SHARED_PREFIX_OVER_ORACLE[row["prefix"]])
    if figure == "17":
        return str(published.CHATBOT_OVER_ORCA)
    return None


def throughput_table(result: dict[str, Any]) -> str:
    fit = result["fit"]
    text = [
        f"{fit['name']}: mean error {100 * fit['mean_absolute_error']:.0f} %, largest "
        f"{100 * fit['largest_error']:.0f} %, of {fit['points']} measured steps; ms: "
        + ", ".join(f"{name} {1e3 * value:.4g}" for name, value in fit["coefficients"].items())
    ]
    for title, figures in (
        ("Figures 12, 14, 16, 17: sustained requests/s (OPT-13B on A100-40GB; SIMULATION)", ["12", "14", "16", "17"]),
        (f"Figure 12 with the step times of this machine, ({fit['name']})", ["12, fitted"]),
    ):
        rows = [
            [row["figure"][:2], row["label"], row["over"], row["rate"], row["quire"], row["ratio"], row["paper"]]
            for figure in figures
            for row in result["ratios"]
            if row["figure"] == figure
        ]
        columns = ["figure", "workload", "baseline", "its rate", "Quire's rate", "ratio", "paper's ratio"]
        text.append(table(title, columns, rows))
    return "\n\n".join(text)
