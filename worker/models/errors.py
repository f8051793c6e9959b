"""What is wrong with a checkpoint, said in one line: what, where, and what to do about it."""

from __future__ import annotations

from quire.shared.errors import StartError


class CheckpointError(StartError):
    """A model cannot be loaded as it is. The message names the place, the fault and a remedy, and is one line."""

    def __init__(self, where: object, what: str, remedy: str) -> None:
        super().__init__(" ".join(f"{where}: {what}; {remedy}".split()))


class NotSupported(CheckpointError):
    """Nothing is wrong with the checkpoint; it is of a kind that is not known here."""
