"""What became of a worker's commits, counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.shared.broker import StepCommit
from quire.shared.messages import OUTCOMES
from quire.shared.telemetry.prometheus import STEP_S, Histogram


class CommitCounts:
    """Commits, and the attempts that ended with one or without."""

    def __init__(self) -> None:
        # Of those that Redis answered.
        self.seconds = Histogram(STEP_S)
        self.requests = 0
        self.failed = 0
        # Attempts that another worker or outcome had overtaken: told by a commit, or when leases were renewed.
        self.fenced = 0
        self.leases_lost = 0
        # Requests whose log had lost its end.
        self.resent = 0
        self.ended = dict.fromkeys(OUTCOMES, 0)

    @contextmanager
    def timed(self, commits: Sequence[StepCommit]) -> Iterator[None]:
        """One commit, from here to Redis' answer."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed += 1
            raise
        self.seconds.observe(time.perf_counter() - began)
        self.requests += len(commits)
