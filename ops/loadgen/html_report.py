"""The result as an HTML page: one file, without scripts or external resources. All texts are escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from quire.ops.loadgen import words
from quire.ops.loadgen.client import RequestRecord
from quire.ops.loadgen.measures import Distribution, Summary, blocks_of, percentile, summaries, was_cut
from quire.ops.loadgen.runner import Run
from quire.ops.loadgen.svg import COLOURS, Series, SvgMark, plot
from quire.ops.loadgen.table import SHARES

CDF_POINTS = 200
# Percentiles that are marked on the curves.
MARKED = (0.5, 0.95, 0.99)
TIME_BINS = 60
MOST_POINTS = 2000

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1em; color: #666; } .headline { font-size: 1.3em; margin: .4em 0; }
h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1em; }
svg { width: 100%; } svg text { font: 10px system-ui, sans-serif; fill: #555; }
svg text.mark { fill: #222; }
svg text.title { font-size: 12px; fill: #222; font-weight: 600; }
.grid { stroke: #e6e6e6; fill: none; } .line { fill: none; stroke-width: 1.6; }
.note { background: #fff6e0; padding: .3em .8em; margin: .3em 0; }
"""


def page(run: Run, result: dict[str, Any]) -> str:
    """Return the whole page. `result`: the result as in the JSON."""
    servers, sides = result["servers"], summaries(run)
    labels = [server["label"] for server in servers]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>quire bench</title>',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<style>{STYLE}</style></head><body><h1>quire bench</h1>",
    ]
    for colour, server, side in zip(COLOURS, servers, sides, strict=False):
        parts += [
            f'<p class="headline"><b style="color: {colour}">&#9632;</b> '
            f"{escape(words.headline(server['label'], side))}</p>",
            f"<p>{escape(_about(server))}</p>",
        ]
        if text := words.goodput(side, run.plan.slo):
            parts.append(f"<p>Goodput: {escape(text)}.</p>")
    parts.append(f"<p>Load: {escape(words.load(run.plan))}.</p>")
    parts += [f'<p class="note">{escape(text)}</p>' for text in result["warnings"]]
    if result["comparison"]:
        rows = [
            [
                measure["name"],
                *(words.number(measure[key]) for key in ("first", "second")),
                *(f"{measure[key]:.2f}" for key in ("ratio", "least", "most")),
            ]
            for measure in result["comparison"]
        ]
        parts += [
            "<h2>Second to first</h2>",
            _table(["", "first", "second", "ratio", "least of the blocks", "most of the blocks"], rows),
        ]
    parts += ["<h2>Throughput</h2>", _table(["", *labels], _throughput(sides))]
    if rows := list(_latencies(labels, sides)):
        parts += ["<h2>Latency in ms</h2>", _table(["", *SHARES], rows)]
    errors = [(server["label"], error) for server in servers for error in server["errors"]]
    if errors:
        rows = [[url, str(error["count"]), error["kind"], error["first_message"]] for url, error in errors]
        parts += ["<h2>Errors</h2>", _table(["server", "number", "kind", "first message"], rows)]
    parts += ["<h2>Plots</h2>", f'<div class="plots">{"".join(_plots(run))}</div>']
    facts = words.facts(result, run.plan.slo)
    for title, pairs in (("Run", facts), ("Settings", words.settings(result["settings"]))):
        parts += [f"<h2>{title}</h2>", _table((), pairs, text=True)]
    return "".join([*parts, "</body></html>\n"])


def _about(server: dict[str, Any]) -> str:
    cut = f", {server['cut_short']} cut short" if server["cut_short"] else ""
    return (
        f"{server['completed']} of {words.counted(server['requests'], 'request')} completed in "
        f"{words.milliseconds(1000 * server['seconds'])}{cut}. Model {server['model']}, "
        f"server {server['software'] or 'unknown'}."
    )


def _throughput(sides: Sequence[Summary]) -> list[list[str]]:
    """Return the rows that have a value for at least one server."""
    rows: list[tuple[str, Callable[[Summary], float | None]]] = [
        ("requests/s", lambda side: side.requests_per_s),
        ("input tokens/s", lambda side: side.input_tokens_per_s),
        ("output tokens/s", lambda side: side.output_tokens_per_s),
        ("requests/s that met the limits", lambda side: side.good_per_s),
        ("% of requests that met the limits", lambda side: side.good_share and 100 * side.good_share),
        ("open requests, mean", lambda side: side.mean_concurrency),
        ("failed requests", lambda side: side.failed),
    ]
    valued = [(title, [value(side) for side in sides]) for title, value in rows]
    return [
        [title, *("" if value is None else words.number(value) for value in values)]
        for title, values in valued
        if any(value is not None for value in values)
    ]


def _latencies(labels: Sequence[str], sides: Sequence[Summary]) -> Iterable[list[str]]:
    for name, meaning in words.LATENCIES.items():
        for label, side in zip(labels, sides, strict=True):
            latency: Distribution | None = getattr(side, f"{name}_ms")
            if latency is not None:
                where = f", {label}" if len(labels) > 1 else ""
                yield [
                    f"{name.upper()}, {meaning}{where}",
                    *(words.number(getattr(latency, share)) for share in SHARES),
                ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: bool = False) -> str:
    top = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>" if head else ""
    kind = ' class="text"' if text else ""
    body = "".join("<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def _plots(run: Run) -> Iterable[str]:
    names = [server.label for server in run.servers]
    done = [
        [r for block in blocks_of(run, number) for r in block.records if r.ok and not was_cut(r)]
        for number in range(len(names))
    ]

    def each(points: Any) -> list[Series]:
        return [Series(name, points(records)) for name, records in zip(names, done, strict=True)]

    def distributions(title: str, y_name: str, values: Callable[[list[RequestRecord]], list[float]]) -> str:
        """Plot cumulative distributions, with marked percentiles."""
        series = []
        for name, records in zip(names, done, strict=True):
            ordered = sorted(values(records))
            marks = (
                [SvgMark(f"p{100 * at:.0f}", 1000 * percentile(ordered, at), at) for at in MARKED] if ordered else []
            )
            series.append(Series(name, cdf(ordered), marks))
        return plot(title, "ms", y_name, series)

    yield distributions("Time to the first token", "share of requests", lambda rs: [r.ttft_s for r in rs])
    yield distributions("Gaps between chunks", "share of gaps", lambda rs: [gap for r in rs for gap in r.gaps_s])
    yield distributions("Time to the end", "share of requests", lambda rs: [r.e2e_s for r in rs])
    end_s = max((block.ended for block in run.blocks), default=run.started) - run.started
    yield plot("Output", "s", "tokens/s", each(lambda rs: output_over_time(rs, run.started, end_s)))
    yield plot("Open requests", "s", "requests", each(lambda rs: open_over_time(rs, run.started, end_s)))
    for title, value in (("Time to the first token", "ttft_s"), ("Time to the end", "e2e_s")):
        yield plot(
            f"{title}, by when it was sent",
            "s",
            "ms",
            each(lambda rs, value=value: [(r.sent - run.started, 1000 * getattr(r, value)) for r in thin(rs)]),
            lines=False,
        )


def cdf(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Return points (milliseconds, share of values up to it), at most CDF_POINTS + 1."""
    ordered = sorted(seconds)
    steps = min(CDF_POINTS, max(1, len(ordered) - 1))
    return [(1000 * percentile(ordered, i / steps), i / steps) for i in range(steps + 1)] if ordered else []


def output_over_time(records: Sequence[RequestRecord], started: float, end_s: float) -> list[tuple[float, float]]:
    """Return points (second, tokens per second), TIME_BINS of them. An answer's tokens are spread over its chunks."""
    if end_s <= 0:
        return []
    width = end_s / TIME_BINS
    bins = [0.0] * TIME_BINS
    for record in records:
        weight = record.tokens / len(record.chunks)
        for at in record.chunks:
            bins[min(TIME_BINS - 1, max(0, int((at - started) / width)))] += weight
    return [((i + 0.5) * width, tokens / width) for i, tokens in enumerate(bins)]


def open_over_time(records: Sequence[RequestRecord], started: float, end_s: float) -> list[tuple[float, float]]:
    """Return points (second, open requests at that time), TIME_BINS of them."""
    moments = [(i + 0.5) * end_s / TIME_BINS for i in range(TIME_BINS)] if end_s > 0 else []
    return [(at, float(sum(r.sent - started <= at < r.ended - started for r in records))) for at in moments]


def thin(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    """Return at most about MOST_POINTS evenly chosen records, so that the page stays small."""
    return records[:: max(1, -(-len(records) // MOST_POINTS))]
