"""Counters and histograms of the queue: claims by the consumer, and commits by the committer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.shared.protocol.broker import Claim, StepCommit
from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.messages import OUTCOMES
from quire.shared.telemetry.prometheus import STEP_S, WAIT_S, Histogram


class ClaimCounts:
    """Granted claims. A claim after the first one of its request is a migration."""

    def __init__(self) -> None:
        self.first = 0
        self.migrated = 0
        # First claims of requests with a prefix that a worker held, by placement (see `Claim`).
        self.placed = dict.fromkeys(("holder", "waited", "busy"), 0)
        # Queueing times of first claims. A migrated request spent its time with another worker too.
        self.waited_s = {name: Histogram(WAIT_S) for name in PRIORITY_CLASSES}

    def note(self, claim: Claim) -> None:
        """Count a granted claim."""
        if claim.deliveries > 1:
            self.migrated += 1
            return
        self.first += 1
        if claim.placement in self.placed:
            self.placed[claim.placement] += 1
        if (waited_s := self.waited_s.get(claim.priority_class)) is not None:
            waited_s.observe(claim.waited_ms / 1000)


class CommitCounts:
    """Commits to Redis, and how attempts ended."""

    def __init__(self) -> None:
        self.seconds = Histogram(STEP_S)  # of commits that Redis answered
        self.requests = 0  # in commits that Redis answered
        self.failed = 0
        # Attempts that turned out to be superseded: a commit said so, or the renewal of their leases did.
        self.fenced = 0
        self.leases_lost = 0
        # Requests whose log in Redis had lost its end.
        self.resent = 0
        self.ended = dict.fromkeys(OUTCOMES, 0)

    @contextmanager
    def timed(self, commits: Sequence[StepCommit]) -> Iterator[None]:
        """Measure one commit, until Redis answers or an exception leaves the block."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed += 1
            raise
        self.seconds.observe(time.perf_counter() - began)
        self.requests += len(commits)
