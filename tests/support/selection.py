"""Parameters of tests of which CI runs a part: all of them take longer than CI allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters: the first one and each `count`-th after it run in CI, the others are `soak`."""
    return [
        value if index % count == 0 else pytest.param(value, marks=pytest.mark.soak)
        for index, value in enumerate(values)
    ]
