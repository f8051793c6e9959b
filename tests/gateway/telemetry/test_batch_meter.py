"""The counts of batches."""

from __future__ import annotations

from quire.gateway.telemetry.batch_meter import BatchMeter


def test_windows_add_up() -> None:
    meter = BatchMeter()
    meter.ended(5, 1)
    meter.ended(3, 0)
    assert (meter.completed, meter.failed) == (8, 1)
