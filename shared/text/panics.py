"""Panics of the libraries in Rust, which are no `Exception` in Python: such a panic would end a task or a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of tokenizers or llguidance; each library has its own class for it."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def faults_as(error: Callable[[str], Exception]) -> Iterator[None]:
    """Replace exceptions and panics of a library by `error`, called with their first line."""
    try:
        yield
    except BaseException as fault:
        if not isinstance(fault, Exception) and not is_panic(fault):
            raise
        lines = str(fault).splitlines() or [type(fault).__name__]
        raise error(lines[0][:300]) from fault
