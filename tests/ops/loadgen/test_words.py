"""Figures as people read them."""

from __future__ import annotations

import pytest

from quire.ops.loadgen import words


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.5476181999080814, "0.548"), (3.14159, "3.14"), (42.4242, "42.4"), (1234.56, "1,235"), (7.0, "7"), (0.0, "0")],
)
def test_numbers_are_rounded(value: float, said: str) -> None:
    assert words.number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.00671, "0.01 ms"), (8.214, "8.21 ms"), (99.999, "100 ms"), (2000.0, "2 s"), (12_345.0, "12.3 s")],
)
def test_times_have_a_unit(value: float, said: str) -> None:
    assert words.milliseconds(value) == said
