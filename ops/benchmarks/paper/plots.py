"""One figure per experiment, readable without colour: hatching, line styles and markers tell systems apart.

Bars and lines show our results, black diamonds the paper's values. Computed results are marked SIMULATION.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure

from quire.ops.benchmarks.paper import published
from quire.ops.benchmarks.paper.memory import PARTS

GREYS = ("0.25", "0.5", "0.72", "0.9")
HATCHES = ("", "//", "..", "xx")
LINES = {
    "Quire": ("black", "-", "o"),
    "Orca (Oracle)": ("0.35", "--", "s"),
    "Orca (Pow2)": ("0.5", "-.", "^"),
    "Orca (Max)": ("0.65", ":", "v"),
    "FasterTransformer": ("0.75", "-", "x"),
}
PAPER: dict[str, Any] = {"marker": "D", "color": "black", "linestyle": "none", "label": "the paper", "zorder": 3}
# Makes equal runs write equal files.
METADATA = {"png": {"Software": None}, "svg": {"Date": None}}


def save(result: dict[str, Any], name: str, draw: Callable[[dict[str, Any]], Figure], folder: Path) -> list[str]:
    """Write a figure as NAME.png and NAME.svg; returns the names of the files."""
    with pyplot.rc_context(
        {"svg.hashsalt": "quire", "font.size": 9, "axes.spines.right": False, "axes.spines.top": False}
    ):
        figure = draw(result)
        for kind, metadata in METADATA.items():
            figure.savefig(folder / f"{name}.{kind}", dpi=150, metadata=metadata, bbox_inches="tight")
        pyplot.close(figure)
    return [f"{name}.{kind}" for kind in METADATA]


def memory(result: dict[str, Any]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2))
    names = [row["allocator"] for row in result["rows"]]
    bottom = [0.0] * len(names)
    for part, grey, hatch in zip(PARTS, GREYS, HATCHES, strict=True):
        heights = [row["parts"][part] for row in result["rows"]]
        axes.bar(names, heights, 0.6, bottom=bottom, color=grey, hatch=hatch, edgecolor="black", label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.plot(names, [published.EFFECTIVE_USE[name] for name in names], **{**PAPER, "markeredgecolor": "white"})
    axes.set_ylabel("KV cache memory, %")
    axes.set_title("Fig. 2: what the cache holds (ShareGPT, OPT-13B; SIMULATION)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def batch(result: dict[str, Any]) -> Figure:
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3))
    for axes, (trace, paper) in zip(panels, published.BATCHED.items(), strict=True):
        rows = [row for row in result["rows"] if row["trace"] == trace]
        names = [row["allocator"].replace(" ", "\n") for row in rows]
        axes.bar(names, [row["batched"] for row in rows], 0.6, color="0.72", edgecolor="black", label="ours")
        axes.plot(names, [paper[row["allocator"]] for row in rows], **PAPER)
        axes.set_title(f"{trace}, {published.BATCHED_RATES[trace]:g} requests/s")
    panels[0].set_ylabel("batched requests (SIMULATION)")
    panels[0].legend(frameon=False)
    figure.suptitle("Fig. 13: requests that run at once")
    figure.tight_layout()
    return figure


def sharing(result: dict[str, Any]) -> Figure:
    kinds = list(dict.fromkeys((row["trace"], row["method"]) for row in result["rows"]))
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(2.4 * len(kinds), 3), sharey=True, squeeze=False)
    for axes, (trace, method) in zip(panels[0], kinds, strict=True):
        rows = [row for row in result["rows"] if (row["trace"], row["method"]) == (trace, method)]
        names = [str(row["sequences"]) for row in rows]
        axes.bar(names, [row["saved"] for row in rows], 0.6, color="0.72", edgecolor="black", label="ours")
        known = [(name, row["paper"]) for name, row in zip(names, rows, strict=True) if row["paper"] is not None]
        axes.plot([name for name, _ in known], [value for _, value in known], **PAPER)
        axes.set_title(f"{trace},\n{method}")
        axes.set_xlabel("sequences")
    panels[0][0].set_ylabel("blocks saved, %")
    panels[0][0].legend(frameon=False)
    figure.suptitle("Fig. 15: memory saved by sharing (demo model)")
    figure.tight_layout()
    return figure


def throughput(result: dict[str, Any]) -> Figure:
    rows = result["rows"]
    kinds = list(dict.fromkeys((row["figure"], row["label"]) for row in rows))
    columns = 4
    lines = -(-len(kinds) // columns)
    figure, panels = pyplot.subplots(lines, columns, figsize=(3.1 * columns, 2.6 * lines), squeeze=False)
    for axes in panels.flat[len(kinds) :]:
        axes.set_visible(False)
    for axes, (number, label) in zip(panels.flat, kinds, strict=False):
        for row in rows:
            if (row["figure"], row["label"]) == (number, label):
                colour, style, marker = LINES[row["system"]]
                points = [(rate, latency) for rate, latency in row["points"] if latency is not None]
                axes.plot(
                    *zip(*points, strict=True), color=colour, linestyle=style, marker=marker, ms=3, label=row["system"]
                )
                axes.axhline(row["limit"], color="0.85", lw=0.8, zorder=0)
        axes.set_ylim(0, 2 * max(row["limit"] for row in rows if (row["figure"], row["label"]) == (number, label)))
        axes.set_title(f"Fig. {number}: {label}", fontsize=8)
    for axes in panels[:, 0]:
        axes.set_ylabel("s/token")
    panels[0][0].legend(frameon=False, fontsize=6)
    figure.suptitle(
        "Normalised latency by requests/s (OPT-13B on A100-40GB, SIMULATION; fitted: step times of this machine)"
    )
    figure.tight_layout()
    return figure


def blocks(result: dict[str, Any]) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3))
    steps = result["decodes"]
    left.bar(
        [str(one["block_size"]) for one in steps],
        [1e3 * one["seconds"] for one in steps],
        color="0.72",
        edgecolor="black",
    )
    left.set_title("decode step of the kernels (measured)")
    left.set_ylabel("ms")
    for trace, (style, marker) in {"ShareGPT": ("-", "o"), "Alpaca": ("--", "s")}.items():
        rows = [row for row in result["rows"] if row["trace"] == trace]
        names = [str(row["block_size"]) for row in rows]
        right.plot(names, [row["latency"] for row in rows], color="black", linestyle=style, marker=marker, label=trace)
        low, high = published.BEST_BLOCK_SIZES[trace]
        best = [row for row in rows if low <= row["block_size"] <= high]
        label = f"best in the paper, {trace}"
        right.plot(
            [str(row["block_size"]) for row in best],
            [row["latency"] for row in best],
            **{**PAPER, "label": label, "markerfacecolor": "white" if trace == "Alpaca" else "black"},
        )
    right.set_title("latency (OPT-13B, SIMULATION)")
    right.set_ylabel("s/token")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.set_xlabel("block size, tokens")
    figure.suptitle("Fig. 18: block size")
    figure.tight_layout()
    return figure


def recovery(result: dict[str, Any]) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3))
    names = [str(one["block_size"]) for one in result["micro"]]
    for mode, style, marker in (("swap", "-", "o"), ("recompute", "--", "s")):
        times = [1e3 * one[mode] for one in result["micro"]]
        left.plot(names, times, color="black", linestyle=style, marker=marker, label=mode)
    left.set_yscale("log")
    left.set_ylabel("ms")
    left.set_xlabel("block size, tokens")
    left.set_title(f"bringing back {result['tokens']} tokens (measured)")
    left.legend(frameon=False)
    labels = [f"{one['mode']}\nblock {one['block_size']}" for one in result["rows"]]
    right.bar(labels, [1e3 * one["latency"] for one in result["rows"]], color="0.72", edgecolor="black")
    right.set_ylabel("normalised latency, ms/token")
    right.set_title("a trace on a cache too small (measured)")
    figure.suptitle("Fig. 19: swap or recompute")
    figure.tight_layout()
    return figure
