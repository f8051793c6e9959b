"""Retry-After from what the whole lane did in the last half minute."""

from __future__ import annotations

import pytest

from quire.gateway.admission.service_rate import ServiceRate


def rate(*samples: tuple[float, int]) -> ServiceRate:
    found = ServiceRate()
    for now, ended in samples:
        found.sample(now, {"accepted": 10**6, "stop": ended - ended // 2, "length": ended // 2})
    return found


@pytest.mark.parametrize(
    ("samples", "waiting", "expected"),
    [
        ([], 100, 5),
        ([(0, 7)], 100, 5),
        ([(0, 0), (10, 100)], 1000, 10),
        ([(0, 0), (10, 100)], 3, 1),
        ([(0, 0), (1, 1)], 10_000, 60),
        ([(0, 5), (30, 5)], 10, 30),
        ([(0, 0), (10, 900), (40, 960)], 100, 5),
        ([(0, 0), (0.5, 1000), (10, 100)], 1000, 10),
        ([(0, 1000), (10, 0), (20, 20)], 100, 5),
    ],
    ids=[
        "nothing is known",
        "one sample is no rate",
        "a tenth of the queue at ten per second",
        "never less than a second",
        "never more than a minute",
        "nothing has ended",
        "what is older than the window does not count",
        "samples that come too fast are left out",
        "redis came back empty",
    ],
)
def test_retry_after(samples: list[tuple[float, int]], waiting: int, expected: int) -> None:
    assert rate(*samples).retry_after_s(waiting) == expected
