"""The error of a rank whose model failed in a call that other ranks made too. See `quire.worker.ranks`."""

from __future__ import annotations


class OutOfStep(Exception):
    """A rank failed in a call that other ranks have made. The ranks may wait for each other, so all ranks must end."""


def reason(error: BaseException) -> BaseException:
    """Return the cause of an OutOfStep on this rank, if there is one; else the error itself."""
    return error.__cause__ if isinstance(error, OutOfStep) and error.__cause__ else error
