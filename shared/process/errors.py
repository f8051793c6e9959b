"""The errors with which a process refuses to start."""

from __future__ import annotations


class StartError(RuntimeError):
    """A process cannot start. The text is one line: the setting or file, its value, the cause and the remedy."""


class CheckpointError(StartError):
    """A checkpoint cannot be loaded. The message is one line: the place, the fault and a remedy."""

    def __init__(self, where: object, what: str, remedy: str) -> None:
        super().__init__(" ".join(f"{where}: {what}; {remedy}".split()))


class NotSupported(CheckpointError):
    """The checkpoint is valid, but its kind of model is not supported."""
