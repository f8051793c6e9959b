"""The interpreter of a worker's process, which two threads share: the engine's and that of the event loop."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SWITCH_INTERVAL_S = 0.0005


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports: they make a million objects that stay, and the collector would look through them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Call it once everything that lives as long as the process is there."""
    # The event loop needs the interpreter between the engine's calls; by default it would wait up to 5 ms for it.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What exists now is never garbage: the collector need not look at it in every step.
    gc.collect()
    gc.freeze()


def leave(code: int) -> NoReturn:
    """End the process, without the end of its interpreter.

    That aborts a process of which another thread is inside of torch: the engine's, where a worker ends because of
    something else. And torch.distributed may abort or hang in it.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
