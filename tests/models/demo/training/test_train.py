"""The learning rate of the training run."""

from __future__ import annotations

import pytest
from models.demo.training.train import WARMUP_STEPS, rate_at


def test_the_rate_warms_up_and_falls_to_a_hundredth() -> None:
    assert rate_at(0, 0.0, 1.0) == pytest.approx(1 / WARMUP_STEPS)
    assert rate_at(WARMUP_STEPS, 0.0, 2.0) == pytest.approx(2.0)
    assert rate_at(1000, 0.5, 1.0) == pytest.approx(0.505)
    assert rate_at(1000, 1.0, 1.0) == pytest.approx(0.01)
    rates = [rate_at(1000, done / 100, 1.0) for done in range(101)]
    assert rates == sorted(rates, reverse=True)
