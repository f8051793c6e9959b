"""How fast a lane works, and so when a client that was refused should come again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from quire.shared.messages import OUTCOMES

RATE_WINDOW_S = 30.0
SAMPLE_S = 0.9
MAX_RETRY_AFTER_S = 60
# While nothing is known.
UNKNOWN_RETRY_AFTER_S = 5


class ServiceRate:
    """Requests of the lane that ended per second over the last RATE_WINDOW_S, whichever gateway they came through."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now: float, totals: Mapping[str, int]) -> None:
        """Take note of the counters of the lane at `now`, in seconds."""
        ended = sum(totals.get(outcome, 0) for outcome in OUTCOMES)
        samples = self._samples
        if samples and ended < samples[-1][1]:
            samples.clear()  # Redis has come back older, or empty
        if not samples or now - samples[-1][0] >= SAMPLE_S:
            samples.append((now, ended))
        # One that is older stays: the rate is over the whole window.
        while len(samples) > 1 and now - samples[1][0] >= RATE_WINDOW_S:
            samples.popleft()

    def retry_after_s(self, waiting: int) -> int:
        """When to try again with `waiting` requests in the queue, in whole seconds: when a tenth of them is gone."""
        samples = self._samples
        if len(samples) < 2:
            return UNKNOWN_RETRY_AFTER_S
        (since, before), (until, ended) = samples[0], samples[-1]
        # Where nothing has ended yet, it is as if one request were about to.
        rate = max(1, ended - before) / (until - since)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(0.1 * waiting / rate)))
