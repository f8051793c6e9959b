"""Plots as SVG text, for a page without scripts: lines and points on two axes, one colour per series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from quire.ops.loadgen.words import number

# The width of a plot and the height of its axes.
WIDTH, AXIS = 460, 184
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 38
COLOURS = ("#1565c0", "#d84315")
TICKS = 5


# Height of the line above the axes that lists the marks of a series, and the gap after these lines.
MARKS_LINE, MARKS_GAP = 13, 6


@dataclass(frozen=True)
class SvgMark:
    """A point of a curve with a name, such as a percentile."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Series:
    """The points of one server. `name`: tooltip of the line. `marks`: dots on the line, listed above the plot."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[SvgMark] = ()


def plot(title: str, x_name: str, y_name: str, series: Sequence[Series], *, lines: bool = True) -> str:
    """Return an `<svg>` whose axes start at 0. Texts are escaped."""
    right = _round_up(max((x for curve in series for x, _ in curve.points), default=0.0))
    most = _round_up(max((y for curve in series for _, y in curve.points), default=0.0))
    marked = [(COLOURS[index % len(COLOURS)], curve.marks) for index, curve in enumerate(series) if curve.marks]
    top = TOP + (MARKS_LINE * len(marked) + MARKS_GAP if marked else 0)
    bottom = top + AXIS

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / right, bottom - AXIS * y / most

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for tick in range(TICKS + 1):
        x, y = place(right * tick / TICKS, most * tick / TICKS)
        parts += [
            f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}M{x:.1f} {top}V{bottom}"/>',
            f'<text class="tick" x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{most * tick / TICKS:g}</text>',
            f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{right * tick / TICKS:g}</text>',
        ]
    for index, curve in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        places = [place(x, y) for x, y in curve.points]
        if lines and places:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path class="line" stroke="{colour}" d="M{path}"><title>{escape(curve.name)}</title></path>')
        else:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" opacity=".6"/>' for x, y in places]
    for line, (colour, marks) in enumerate(marked):
        listed = " · ".join(f"{mark.name} {number(mark.x)} {x_name}" for mark in marks)
        y = TOP + 2 + MARKS_LINE * line
        parts.append(f'<text class="mark" x="{LEFT}" y="{y}" style="fill: {colour}">{escape(listed)}</text>')
        for mark in marks:
            x, y = place(mark.x, mark.y)
            parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            if len(marked) > 1:  # the names of two curves would overlap
                continue
            # p95 and p99 are close: the name of the last mark is above the curve, all other names are below.
            anchor, shift = ("end", -4) if x > WIDTH - RIGHT - 30 else ("start", 4)
            below = -5 if mark is marks[-1] else 12
            parts.append(
                f'<text class="mark" x="{x + shift:.1f}" y="{y + below:.1f}" text-anchor="{anchor}">'
                f"{escape(mark.name)}</text>"
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text class="name" x="{middle:.0f}" y="{bottom + BOTTOM - 6}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text class="name" x="{WIDTH - RIGHT}" y="16" text-anchor="end">{escape(y_name)}</text>',
        "</svg>",
    ]
    return "".join(parts)


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten, so that ticks are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if value <= step * power * (1 + 1e-9))
