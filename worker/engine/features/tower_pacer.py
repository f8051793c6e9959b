"""The steps that run a vision tower. A run cannot be divided, and may take as long as many steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.worker.engine.pacing import WEIGHT


class TowerPacer:
    """Decides which steps may run the vision tower, so that sequences next to a stream of images advance.

    A step runs the tower once at most. The tower then waits until as much time has passed without it as the run took,
    or until there is nothing else to compute. So it takes at most half of the time while other sequences have work.
    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.num_runs = 0
        self.total_s = 0.0  # of all runs
        self.expected_s = 0.0  # of the next run: an average
        self._owed_s = 0.0  # that steps have to take without the tower
        self._began = self._ended = clock()
        self._total_before_s = 0.0

    @property
    def may_run(self) -> bool:
        return self._owed_s <= 0

    @property
    def step_s(self) -> float:
        """Seconds of the runs in the current step."""
        return self.total_s - self._total_before_s

    def begin_step(self) -> None:
        self._began, self._total_before_s = self.clock(), self.total_s
        self._owed_s -= self._began - self._ended

    @contextmanager
    def run(self) -> Iterator[None]:
        """Measure a run."""
        began = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - began
            self.expected_s += (WEIGHT if self.num_runs else 1.0) * (seconds - self.expected_s)
            self.num_runs += 1
            self.total_s += seconds
            self._owed_s = max(0.0, self._owed_s) + seconds

    def end_step(self, num_tokens: int) -> None:
        """Note the end of a step that computed this number of tokens."""
        self._ended = self.clock()
        self._owed_s = self._owed_s - (self._ended - self._began - self.step_s) if num_tokens else 0.0
