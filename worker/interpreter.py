"""Tunes the Python interpreter of a worker, which the engine's thread and the event loop share."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

# Exit codes of a worker's processes: the cause has been reported; or EX_SOFTWARE of sysexits.h for anything else.
GAVE_UP, FAILED = 1, 70
# Longest time for which a thread keeps the interpreter's lock while another one waits for it.
SWITCH_INTERVAL_S = 0.0005


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection during imports, which make a million lasting objects, and exempt these from it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Tune thread switches and garbage collection. Call it once all objects that last as long as the process exist."""
    # The event loop runs between calls of the engine; by default it waits up to 5 ms for the interpreter's lock.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Objects that exist now never become garbage, so collections can skip them.
    gc.collect()
    gc.freeze()
    release_free_memory()


def release_free_memory() -> None:
    """Return memory that malloc keeps free to the system: loading leaves copies of weights behind."""
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def leave(code: int) -> NoReturn:
    """End the process without finalizing the interpreter.

    Finalization aborts a process in which another thread, such as the engine's, is inside of torch. torch.distributed
    may also abort or hang in it.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
