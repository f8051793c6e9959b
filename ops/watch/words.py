"""Tables and durations as text."""

from __future__ import annotations

from collections.abc import Sequence


def lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table: each column as wide as its longest text, the last one not padded."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [heads, *rows]]
    return ["  ".join(row).rstrip() for row in padded]


def duration(seconds: float) -> str:
    """Return a time in two units at most: `31 ms`, `2.4 s`, `5 min 3 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 1:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
