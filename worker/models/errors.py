"""Errors of checkpoints: one line with the place, the fault and a remedy."""

from __future__ import annotations

from quire.shared.errors import StartError


class CheckpointError(StartError):
    """A checkpoint cannot be loaded. The message is one line: the place, the fault and a remedy."""

    def __init__(self, where: object, what: str, remedy: str) -> None:
        super().__init__(" ".join(f"{where}: {what}; {remedy}".split()))


class NotSupported(CheckpointError):
    """The checkpoint is valid, but its kind of model is not supported."""
