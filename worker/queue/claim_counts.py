"""What a worker has taken off the queue, counted."""

from __future__ import annotations

from quire.shared.broker import Claim
from quire.shared.keys import PRIORITY_CLASSES
from quire.shared.telemetry.prometheus import WAIT_S, Histogram


class ClaimCounts:
    """Claims of requests. One that another attempt has begun is a migration, and did not wait in the queue alone."""

    def __init__(self) -> None:
        self.first = 0
        self.migrated = 0
        self.waited_s = {name: Histogram(WAIT_S) for name in PRIORITY_CLASSES}

    def note(self, claim: Claim) -> None:
        """A claim that was granted."""
        if claim.deliveries > 1:
            self.migrated += 1
            return
        self.first += 1
        if (waited_s := self.waited_s.get(claim.priority_class)) is not None:
            waited_s.observe(claim.waited_ms / 1000)
