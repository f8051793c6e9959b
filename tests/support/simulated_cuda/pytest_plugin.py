"""Runs tests on a simulated device that would otherwise need a card.

python -m pytest -p tests.support.simulated_cuda.pytest_plugin tests/gpu
"""

from __future__ import annotations

import pytest

from tests.support.simulated_cuda.driver import simulated_cuda

TOTAL = 400 << 20


def pytest_configure(config: pytest.Config) -> None:
    device = simulated_cuda(total=TOTAL)
    device.__enter__()
    config.add_cleanup(lambda: device.__exit__(None, None, None))


def pytest_report_header() -> str:
    return "CUDA: a simulated device, which shows nothing about a card"
