"""Bounds of numbers, moved towards the answers as far as llguidance needs it."""

from __future__ import annotations

import math
from typing import Any

from quire.shared.text.grammar_error import GrammarError

# llguidance has bounds of 64 bits; this is the largest that is exact as a float.
_LARGEST = 2**63 - 1024
# llguidance refuses a bound from 10**18 on, unless there is a bound on its other side, too.
_ONE_SIDED = 9 * 10**17
# A digit after the point costs a level of an expression, and llguidance has less than a hundred.
_SMALLEST = 1e-50
# Whole numbers up to this are exact as floats.
_EXACT = 2**53
_STEP = 1e-6
# Bounds beyond this are too large for the step to be exact.
_LARGE = 1_000_000
_TYPES = (int, float, type(None))


def write_out_bounds(schema: dict[str, Any]) -> None:
    """Move bounds, in place, to numbers that llguidance follows exactly. Raise GrammarError if there are none."""
    for keyword, sign, other in (
        ("minimum", 1, "maximum"),
        ("exclusiveMinimum", 1, "maximum"),
        ("maximum", -1, "minimum"),
        ("exclusiveMaximum", -1, "minimum"),
    ):
        bound = schema.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        # With the sign, the answers are above the bound.
        if bound * sign > _LARGEST:
            raise GrammarError(f"{keyword} is beyond {sign * _LARGEST}, the largest number of an answer with bounds")
        schema[keyword] = sign * _followed(bound * sign, keyword.startswith("exclusive"))
        if bound * sign > _ONE_SIDED:
            schema.setdefault(other, sign * _LARGEST)
    _make_inclusive(schema)


def _followed(bound: float, is_exclusive: bool) -> float:
    """Return the bound itself, or a number a little above it that llguidance follows exactly."""
    if bound < -_LARGEST:
        return -_LARGEST
    if 0 < abs(bound) < _SMALLEST:
        return _SMALLEST if bound > 0 else 0
    if abs(bound) > _EXACT:
        nearest = float(bound)
        # llguidance takes a large exclusive bound for inclusive.
        is_inside = nearest > bound if is_exclusive else nearest >= bound
        return int(nearest if is_inside else math.nextafter(nearest, math.inf))
    return bound


def _make_inclusive(schema: dict[str, Any]) -> None:
    """Move exclusive bounds that are whole numbers inwards by a millionth.

    llguidance takes such a bound for inclusive if the other bound is a fraction next to it, as in 0 < x <= 0.5.
    """
    for exclusive, inclusive, step, nearer in (
        ("exclusiveMinimum", "minimum", _STEP, max),
        ("exclusiveMaximum", "maximum", -_STEP, min),
    ):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        if schema.get("type") == "integer" or type(other) not in _TYPES or bound is None or type(bound) not in _TYPES:
            continue
        if bound == int(bound) and abs(bound) < _LARGE:
            del schema[exclusive]
            schema[inclusive] = bound + step if other is None else nearer(other, bound + step)
