"""Patterns of layer names in the configuration of compressed-tensors: names, `Linear`, and regular expressions.

Regular expressions come from the checkpoint. Those whose matching time could explode are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

EXPRESSION, ALL = "re:", "Linear"
MAX_PATTERNS, MAX_LENGTH, MAX_REPEATS = 20_000, 512, 6
_NESTED = re.compile(r"\)[*+{]|\\[1-9]|\(\?P=|\(\?\(")  # a repeated group, or a reference to one
_REPEAT = re.compile(r"(?<!\\)[*+{]")


class PatternError(ValueError):
    """A pattern that cannot be honoured. The message says why."""


class LayerNames:
    """A set of layers, given by patterns."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Compile the patterns. Raises PatternError."""
        if len(patterns) > MAX_PATTERNS:
            raise PatternError(f"has {len(patterns)} entries; supported: {MAX_PATTERNS}")
        self._all = ALL in patterns
        self._names = {pattern for pattern in patterns if not pattern.startswith(EXPRESSION)}
        expressions = [pattern.removeprefix(EXPRESSION) for pattern in patterns if pattern.startswith(EXPRESSION)]
        self._expressions = [compile_bounded(expression) for expression in expressions]

    def match(self, name: str) -> int:
        """Return how closely the patterns describe a layer: 3 by name, 2 by an expression, 1 as `Linear`, 0 not."""
        if name in self._names:
            return 3
        if any(expression.match(name) for expression in self._expressions):
            return 2
        return int(self._all)


def compile_bounded(expression: str, max_repeats: int = MAX_REPEATS) -> re.Pattern[str]:
    """Compile a regular expression of a checkpoint. Raises PatternError if its matching time could explode."""
    if len(expression) > MAX_LENGTH or _NESTED.search(expression) or len(_REPEAT.findall(expression)) > max_repeats:
        raise PatternError(
            f"has the expression {expression[:80]!r}; supported: at most {MAX_LENGTH} characters and {max_repeats} "
            "repeats, and no repeated groups"
        )
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"has the expression {expression[:80]!r}, which is malformed ({error})") from None
