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


AGAIN = "download the file again"


class FileError(StartError):
    """A file of a model cannot be read. The parts are kept, so that callers can raise an error of their own."""

    def __init__(self, where: object, what: str, remedy: str = AGAIN) -> None:
        super().__init__(" ".join(f"{where}: {what}; {remedy}".split()))
        self.where, self.what, self.remedy = where, what, remedy
