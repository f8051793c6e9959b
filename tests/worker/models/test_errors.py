"""Errors of checkpoints are one line with the place, the fault and the remedy."""

from __future__ import annotations

from quire.shared.errors import StartError
from quire.worker.models.errors import CheckpointError, NotSupported


def test_the_message_is_one_line_with_place_fault_and_remedy() -> None:
    error = CheckpointError("/models/x", "a file\nis missing", "add\n  it")
    assert str(error) == "/models/x: a file is missing; add it"


def test_both_errors_stop_the_start_of_a_worker() -> None:
    assert isinstance(NotSupported("x", "y", "z"), CheckpointError)
    assert isinstance(CheckpointError("x", "y", "z"), StartError)
