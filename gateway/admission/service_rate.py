"""The service rate of a lane, from which `Retry-After` follows for clients that were refused."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from quire.shared.protocol.messages import OUTCOMES

RATE_WINDOW_S = 30.0
SAMPLE_S = 0.9
MAX_RETRY_AFTER_S = 60
# Retry-After while the rate is unknown.
UNKNOWN_RETRY_AFTER_S = 5


class ServiceRate:
    """Requests of the lane, of all gateways, that ended per second over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now: float, totals: Mapping[str, int]) -> None:
        """Record the counters of the lane at `now`, in seconds."""
        ended = sum(totals.get(outcome, 0) for outcome in OUTCOMES)
        samples = self._samples
        if samples and ended < samples[-1][1]:
            samples.clear()  # Redis has lost data, and came back with older counters
        if not samples or now - samples[-1][0] >= SAMPLE_S:
            samples.append((now, ended))
        # One sample from before the window stays, so that the rate is over the whole window.
        while len(samples) > 1 and now - samples[1][0] >= RATE_WINDOW_S:
            samples.popleft()

    def retry_after_s(self, waiting: int) -> int:
        """Return whole seconds until a tenth of the `waiting` requests in the queue is done."""
        samples = self._samples
        if len(samples) < 2:
            return UNKNOWN_RETRY_AFTER_S
        (since, before), (until, ended) = samples[0], samples[-1]
        # If no request has ended in the window, count one, so that the rate is not 0.
        rate = max(1, ended - before) / (until - since)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(0.1 * waiting / rate)))
