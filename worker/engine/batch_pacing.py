"""The number of tokens of the class `batch` that a step may compute while calls of higher classes arrive.

A call that arrives waits for the step that runs. A step full of lines of batches takes long, so for a while after each
call of a higher class such steps are bounded by a target time. The pacer learns the number of tokens that meets the
target from the times of the steps that computed only this class. It starts with one token, because it also learns how
short a step can be: where even the shortest step takes longer than the target, the target is a little more than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Time after the last call of a higher class during which steps are bounded, in seconds.
RECENT_S = 10.0
# Measured steps between two changes of the bound.
STEPS_PER_CHANGE = 6
# A bound grows by this factor and one token if steps take less than SHORT of the target.
GROWTH = 1.25
SHORT = 0.95
# The target is at least this many times the time of the shortest step.
LEAST_FACTOR = 1.25
# Changes until a bound that was too high is tried again.
CHANGES_PER_TRIAL = 64


class BatchPacer:
    """Learns from measured steps; `allowance` is the bound for the next one.

    target_s: seconds that a step of only the class `batch` may take. limit: tokens that a step never exceeds.
    clock: returns seconds.
    """

    def __init__(self, target_s: float, limit: int, clock: Callable[[], float] = time.perf_counter) -> None:
        if target_s <= 0 or limit < 1:
            raise ValueError(f"target_s {target_s} and limit {limit} must be above 0")
        self.target_s = target_s
        self.limit = limit
        self.clock = clock
        self._called_at: float | None = None
        self._restart()

    def _restart(self) -> None:
        self.tokens = 1
        # Seconds of the shortest steps; None before the first change of the bound.
        self._least_s: float | None = None
        # The lowest bound that was too high, and the changes since then.
        self._too_many = self.limit + 1
        self._num_changes = 0
        self._times: list[float] = []

    @property
    def allowance(self) -> int | None:
        """Tokens of the class `batch` that the next step may compute; None if no call was there recently."""
        return self.tokens if self._is_recent() else None

    def _is_recent(self) -> bool:
        return self._called_at is not None and self.clock() - self._called_at <= RECENT_S

    def note_call(self) -> None:
        """Note that a call of a higher class arrives or runs. The pacer learns anew after a while without calls."""
        if not self._is_recent():
            self._restart()
        self._called_at = self.clock()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a bounded step that computed this many tokens of the class `batch` and no others."""
        if 2 * num_tokens <= self.tokens:
            return  # the time of a step that is far from the bound says little about it
        self._times.append(seconds)
        if len(self._times) == STEPS_PER_CHANGE:
            # The median, because other programs delay single steps.
            typical_s = sorted(self._times)[STEPS_PER_CHANGE // 2]
            self._times.clear()
            self._change(typical_s)

    def _change(self, typical_s: float) -> None:
        self._least_s = min(typical_s, self._least_s or typical_s)
        target_s = max(self.target_s, LEAST_FACTOR * self._least_s)
        self._num_changes += 1
        if typical_s > target_s:
            self._too_many, self._num_changes = self.tokens, 0
            self.tokens = max(1, int(self.tokens * max(0.5, target_s / typical_s)))
        elif typical_s < SHORT * target_s:
            if self._num_changes > CHANGES_PER_TRIAL:
                self._too_many = self.limit + 1
            self.tokens = max(1, min(int(self.tokens * GROWTH) + 1, self._too_many - 1))
