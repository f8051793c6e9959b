"""Compares how long requests run with what the pace of the engine lets expect, and corrects the pace by that.

The pace comes from steps. It does not contain what happens around them: commits, a busy event loop, other processes
that take the processor. The correction is what a request takes longer than expected, on average, plus the mean
deviation: by a corrected pace about four of five requests end in time.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from quire.shared.protocol.pace import Pace
from quire.shared.telemetry.prometheus import Histogram

# Weight of the newest request.
WEIGHT = 1 / 32
# Bounds of a ratio, so that one odd request changes little.
LEAST, MOST = 0.5, 4.0
# Buckets of the ratios.
RATIOS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class Started(NamedTuple):
    """A request that has been claimed: the time, in seconds of a monotonic clock, and the pace then."""

    at: float
    prompt_tokens: int
    pace: Pace


class EstimateErrors:
    """The ratios of actual to expected durations, from the claim to the last commit."""

    def __init__(self) -> None:
        self.ratios = Histogram(RATIOS)
        self._mean, self._deviation = 1.0, 0.0

    def note(self, started: Started, answer_tokens: int, pace: Pace, now: float | None = None) -> None:
        """Learn from a request that has ended by itself. pace: at its end, not corrected.

        The engine may have become slower or faster meanwhile, which is no error: the mean of both paces counts.
        """
        prompt_us, token_us = ((before + after) / 2 for before, after in zip(started.pace[:2], pace[:2], strict=True))
        expected_s = (started.prompt_tokens * prompt_us + answer_tokens * token_us) / 1e6
        if expected_s <= 0:
            return
        ratio = ((time.monotonic() if now is None else now) - started.at) / expected_s
        self.ratios.observe(ratio)
        ratio = max(LEAST, min(MOST, ratio))
        self._deviation += WEIGHT * (abs(ratio - self._mean) - self._deviation)
        self._mean += WEIGHT * (ratio - self._mean)

    def corrected(self, pace: Pace) -> Pace:
        """Return a pace at which about four of five requests end in time."""
        factor = self._mean + self._deviation
        return pace._replace(prompt_us=round(factor * pace.prompt_us), token_us=round(factor * pace.token_us))
