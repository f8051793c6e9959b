"""The result on the terminal: plain text, at most 110 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.ops.loadgen import words
from quire.ops.loadgen.measures import Distribution, Summary, client_figures, compare, summaries, warnings
from quire.ops.loadgen.runner import Run

SHARES = ("mean", "p50", "p90", "p95", "p99", "max")


def render(run: Run) -> str:
    """Return the whole result as text; warnings come last."""
    sides = summaries(run)
    lines = [words.headline(server.label, side) for server, side in zip(run.servers, sides, strict=True)]
    lines += ["", words.load(run.plan), f"prompts: {run.prompts.how}", ""]
    for server, side in zip(run.servers, sides, strict=True):
        lines += [" ".join(f"{server.label} {server.model} {server.software}".split()), *_results(run, side), ""]
    if len(sides) == 2:
        lines += [*_compared(run), ""]
    lines += [f"client: {text}" for text in words.lateness(client_figures(run))]
    lines += [f"note: {text}" for text in warnings(run)]
    return "\n".join(lines)


def _results(run: Run, side: Summary) -> list[str]:
    counts = f"{side.completed} of {side.requests} requests completed in {side.seconds:.2f} s"
    if side.failed:
        counts += f", {side.failed} failed"
    if side.cut_short:
        counts += f", {side.cut_short} were cut short"
    lines = [f"  {counts}"]
    lines += [f"    {error.count} x {error.kind}: {error.first_message}" for error in side.errors]
    if not side.completed:
        return lines
    lines.append(
        f"  {side.requests_per_s:.2f} requests/s, {side.input_tokens_per_s:.1f} input and "
        f"{side.output_tokens_per_s:.1f} output tokens/s ({side.input_tokens} and {side.output_tokens} tokens)"
    )
    rate = "" if run.plan.rate is None else f"asked {run.plan.rate:g} requests/s, sent {side.sent_per_s:.2f}; "
    lines.append(f"  {rate}{side.mean_concurrency:.1f} requests open on average")
    if text := words.goodput(side, run.plan.slo):
        lines.append(f"  goodput: {text}")
    rows = [["ms", *SHARES]]
    for name in words.LATENCIES:
        latency: Distribution | None = getattr(side, f"{name}_ms")
        if latency is not None:
            rows.append([name.upper(), *(_number(getattr(latency, share)) for share in SHARES)])
    return lines + columns(rows)


def _compared(run: Run) -> list[str]:
    rows = [["", "first", "second", "ratio", "blocks", ""]]
    for comparison in compare(run):
        spread = f"{comparison.least:.2f} to {comparison.most:.2f}"
        rows.append(
            [
                comparison.name,
                _number(comparison.first),
                _number(comparison.second),
                f"{comparison.ratio:.2f}",
                spread,
                comparison.better,
            ]
        )
    return ["second to first; the last column names the better one if all blocks agree", *columns(rows)]


def columns(rows: Sequence[Iterable[str]]) -> list[str]:
    """Align rows: the first column to the left, all other columns to the right."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
