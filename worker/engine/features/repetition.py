"""Answers that repeat themselves: the last tokens are the same part, several times in a row."""

from __future__ import annotations

from collections.abc import Sequence


def repeats_itself(output: Sequence[int], shortest: int, longest: int, count: int) -> bool:
    """Return whether these tokens end with `count` copies of a part of `shortest` to `longest` tokens."""
    end = len(output)
    for size in range(shortest, min(longest, end // count) + 1):
        start = end - size * count
        # Most parts differ in the last token already.
        if output[-1 - size] == output[-1] and output[start : end - size] == output[start + size : end]:
            return True
    return False
