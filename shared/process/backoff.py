"""Exponential backoff: the delay before each retry doubles up to a limit."""

from __future__ import annotations

import random


class Backoff:
    """Delays of one retry loop, in seconds: `first_s`, then doubled at each retry, at most `limit_s`.

    jitter: multiply each delay by a random factor from 0.5 to 1, so that many processes do not retry at once.
    """

    def __init__(self, first_s: float, limit_s: float, *, jitter: bool = False) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._jitter = jitter
        self._next_s = first_s

    def next(self) -> float:
        """Return the delay before the next retry, and double the delay after it."""
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._limit_s)
        return delay_s * random.uniform(0.5, 1) if self._jitter else delay_s

    def reset(self) -> None:
        """Start again from `first_s`. Call it after a success."""
        self._next_s = self._first_s
