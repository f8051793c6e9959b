"""The counts of the batches of one gateway, which `gateway/admin/metrics.py` exports."""

from __future__ import annotations


class BatchMeter:
    """Lines that this gateway has ended, windows that it has, and lines that it has in flight."""

    def __init__(self) -> None:
        self.completed = 0
        self.failed = 0
        self.taken_over = 0
        self.windows = 0
        self.lines_in_flight = 0

    def ended(self, completed: int, failed: int) -> None:
        """Count the lines of a window that is written."""
        self.completed += completed
        self.failed += failed
