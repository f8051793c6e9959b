"""Checks of embeddings, and of values that the schemas of `programs/forecast.py` allow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

CITIES = ("Paris", "Rome")


def assert_forecast(value: Any) -> None:
    """Check a `Forecast`."""
    assert set(value) == {"city", "sky", "days"}
    assert value["city"] in CITIES
    assert value["sky"] in ("sunny", "cloudy")
    assert value["days"] in (1, 2, 3)


def assert_city(arguments: Any) -> None:
    """Check the arguments of a call of `get_weather`, given as an object or as its JSON text."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(value) == {"city"}
    assert value["city"] in CITIES


def assert_same_vectors(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> None:
    """Check that two lists have the same vectors, of length 1, and that these differ from each other."""
    assert len({tuple(one) for one in some}) == len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert math.hypot(*one) == pytest.approx(1, abs=1e-5)
        assert list(one) == pytest.approx(list(other), abs=1e-6)
