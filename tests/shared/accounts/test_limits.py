"""Limits are read strictly, and money without rounding."""

from __future__ import annotations

from typing import Any

import pytest

from quire.shared.accounts.limits import AccountLimits, money, nanos
from quire.shared.validators import InvalidValue


def test_limits_are_written_as_they_are_read() -> None:
    given = {"models": ["a"], "tokens_per_minute": 5, "cost_per_day": 0.25}
    limits = AccountLimits.of(given)
    assert limits.cost_per_day == 250_000_000
    assert limits.shown() == given
    assert AccountLimits.stored(limits.given()) == limits
    assert AccountLimits().given() == {}


@pytest.mark.parametrize(
    "given",
    [
        {"unknown": 1},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"requests_per_minute": 1.5},
        {"priority": "highest"},
        {"models": "a"},
        {"models": [""]},
        {"cost_per_day": float("nan")},
        {"cost_per_day": "1e99999999"},
        {"cost_per_month": -1},
        {"tokens_per_day": 10**16},
        {"weight": 1001},
        {"weight": -1},
        {"weight": 2.5},
    ],
)
def test_wrong_limits_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        AccountLimits.of(given)
    assert caught.value.name.startswith(next(iter(given)))


def test_money_is_exact() -> None:
    assert nanos("x", "0.000000001") == 1
    assert nanos("x", 0.1) == 10**8
    assert money(10**8) == 0.1
    with pytest.raises(InvalidValue):
        nanos("x", "0.0000000001")
