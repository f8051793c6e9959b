"""The result as a page: one file, without scripts and without anything from elsewhere. All texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ops.loadgen.client import Record
from ops.loadgen.measures import blocks_of, percentile, was_cut
from ops.loadgen.runner import Run
from ops.loadgen.svg import COLOURS, Series, plot
from ops.loadgen.table import LATENCIES, SHARES, headline

CDF_POINTS = 200
TIME_BINS = 60
MOST_POINTS = 2000

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1em; }
svg { width: 100%; } svg text { font: 10px system-ui, sans-serif; fill: #555; }
svg text.title { font-size: 12px; fill: #222; font-weight: 600; }
.grid { stroke: #e6e6e6; fill: none; } .line { fill: none; stroke-width: 1.6; }
.note { background: #fff6e0; padding: .3em .8em; margin: .3em 0; }
"""


def page(run: Run, result: dict[str, Any]) -> str:
    """The whole page; `result` is what the JSON has."""
    servers = result["servers"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>quire bench</title>',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(headline(run))}</h1>",
        *(f'<p class="note">{escape(text)}</p>' for text in result["warnings"]),
        *(
            f'<p><b style="color: {COLOURS[number]}">&#9632;</b> {escape(_title(server))}</p>'
            for number, server in enumerate(servers)
        ),
    ]
    if result["comparison"]:
        rows = [
            [one["name"], *(f"{one[key]:.4g}" for key in ("first", "second", "ratio", "least", "most"))]
            for one in result["comparison"]
        ]
        parts += [
            "<h2>Second to first</h2>",
            _table(["", "first", "second", "ratio", "least of the blocks", "most of the blocks"], rows),
        ]
    parts.append("<h2>Throughput</h2>")
    parts.append(_table(["", *(server["label"] for server in servers)], _throughput(servers)))
    parts.append("<h2>Latency in ms</h2>")
    parts.append(_table(["", *SHARES], list(_latencies(servers))))
    errors = [(server["label"], error) for server in servers for error in server["errors"]]
    if errors:
        rows = [[url, str(one["count"]), one["kind"], one["first_message"]] for url, one in errors]
        parts += ["<h2>Errors</h2>", _table(["server", "number", "kind", "first message"], rows)]
    parts += ["<h2>Plots</h2>", f'<div class="plots">{"".join(_plots(run))}</div>']
    facts = {**result["load"], **result["environment"], **result["client"], "when": result["when"]}
    for title, values in (("Run", facts), ("Settings", result["settings"])):
        rows = [[name, "" if value is None else str(value)] for name, value in values.items()]
        parts += [f"<h2>{title}</h2>", _table(["", ""], rows, text=True)]
    return "".join([*parts, "</body></html>\n"])


def _title(server: dict[str, Any]) -> str:
    counts = f"{server['completed']} of {server['requests']} requests completed in {server['seconds']:.2f} s"
    return f"{server['label']}, model {server['model']}, server {server['software'] or 'unknown'}: {counts}"


def _throughput(servers: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = {
        "requests/s": "requests_per_s",
        "input tokens/s": "input_tokens_per_s",
        "output tokens/s": "output_tokens_per_s",
        "good requests/s": "good_per_s",
        "share of good requests": "good_share",
        "requests open on average": "mean_concurrency",
        "failed": "failed",
    }
    return [
        [title, *("" if server[key] is None else f"{server[key]:.4g}" for server in servers)]
        for title, key in names.items()
    ]


def _latencies(servers: Sequence[dict[str, Any]]) -> Iterable[list[str]]:
    for name in LATENCIES:
        for server in servers:
            if found := server[f"{name}_ms"]:
                yield [f"{name.upper()} {server['label']}", *(f"{found[share]:.2f}" for share in SHARES)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: bool = False) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    kind = ' class="text"' if text else ""
    body = "".join("<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _plots(run: Run) -> Iterable[str]:
    names = [server.label for server in run.servers]
    done = [
        [r for block in blocks_of(run, number) for r in block.records if r.ok and not was_cut(r)]
        for number in range(len(names))
    ]

    def each(points: Any) -> list[Series]:
        return [Series(name, points(records)) for name, records in zip(names, done, strict=True)]

    yield plot("Time to the first token", "ms", "share of requests", each(lambda rs: cdf([r.ttft_s for r in rs])))
    yield plot("Gaps between chunks", "ms", "share", each(lambda rs: cdf([gap for r in rs for gap in r.gaps_s])))
    yield plot("Time to the end", "ms", "share of requests", each(lambda rs: cdf([r.e2e_s for r in rs])))
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
    """(milliseconds, share of values up to it), at most CDF_POINTS + 1 points."""
    ordered = sorted(seconds)
    steps = min(CDF_POINTS, max(1, len(ordered) - 1))
    return [(1000 * percentile(ordered, i / steps), i / steps) for i in range(steps + 1)] if ordered else []


def output_over_time(records: Sequence[Record], started: float, end_s: float) -> list[tuple[float, float]]:
    """(second, tokens per second) in TIME_BINS equal pieces; the tokens of an answer are spread over its chunks."""
    if end_s <= 0:
        return []
    width = end_s / TIME_BINS
    bins = [0.0] * TIME_BINS
    for record in records:
        weight = record.tokens / len(record.chunks)
        for at in record.chunks:
            bins[min(TIME_BINS - 1, max(0, int((at - started) / width)))] += weight
    return [((i + 0.5) * width, tokens / width) for i, tokens in enumerate(bins)]


def open_over_time(records: Sequence[Record], started: float, end_s: float) -> list[tuple[float, float]]:
    """(second, requests that were open then) at TIME_BINS moments."""
    moments = [(i + 0.5) * end_s / TIME_BINS for i in range(TIME_BINS)] if end_s > 0 else []
    return [(at, float(sum(r.sent - started <= at < r.ended - started for r in records))) for at in moments]


def thin(records: Sequence[Record]) -> Sequence[Record]:
    """Evenly chosen records, so that a page stays small."""
    return records[:: max(1, -(-len(records) // MOST_POINTS))]
