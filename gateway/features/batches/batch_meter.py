"""The counts of the batches of one gateway, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from quire.shared.telemetry.prometheus import counter, gauge


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

    def families(self) -> Iterator[Metric]:
        """Yield the metrics."""
        lines = {"completed": self.completed, "failed": self.failed}
        yield counter("quire_batch_lines", "Lines of batches that this gateway has written", lines, ("outcome",))
        yield gauge("quire_batch_lines_in_flight", "Lines of batches in the queue or at workers", self.lines_in_flight)
        yield gauge("quire_batch_windows", "Windows of batches that this gateway has", self.windows)
        yield counter("quire_batch_takeovers", "Windows of batches taken over from other gateways", self.taken_over)
