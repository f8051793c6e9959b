"""Tables of plain text that are also Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cell(value: Any) -> str:
    """Return a number with three or four significant digits; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return str(value)
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a title, and a table whose columns are as wide as they must be."""
    lines = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = [[part.ljust(width) for part, width in zip(line, widths, strict=True)] for line in lines]
    text = [f"| {' | '.join(line)} |" for line in padded]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([title, "", *text])
