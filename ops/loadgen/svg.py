"""Plots as SVG text, for a page without scripts: lines and points on two axes, one colour per series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 38
COLOURS = ("#1565c0", "#d84315")
TICKS = 5


@dataclass(frozen=True)
class Series:
    """Points of one server; `name` is shown in the legend."""

    name: str
    points: Sequence[tuple[float, float]]


def plot(title: str, x_name: str, y_name: str, series: Sequence[Series], *, lines: bool = True) -> str:
    """An `<svg>` whose axes start at 0. Texts are escaped."""
    right = _round_up(max((x for one in series for x, _ in one.points), default=0.0))
    top = _round_up(max((y for one in series for _, y in one.points), default=0.0))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x / right,
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top,
        )

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for tick in range(TICKS + 1):
        x, y = place(right * tick / TICKS, top * tick / TICKS)
        parts += [
            f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>',
            f'<text class="tick" x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{top * tick / TICKS:g}</text>',
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
            f"{right * tick / TICKS:g}</text>",
        ]
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in one.points]
        if lines and places:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path class="line" stroke="{colour}" d="M{path}"><title>{escape(one.name)}</title></path>')
        else:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" opacity=".6"/>' for x, y in places]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text class="name" x="{WIDTH - RIGHT}" y="16" text-anchor="end">{escape(y_name)}</text>',
        "</svg>",
    ]
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten, so that ticks are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if value <= step * power * (1 + 1e-9))
