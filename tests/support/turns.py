"""Tests that run side by side in several processes, and those that must have the machine for themselves."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """The time of one test. One that is `alone` waits until no other runs, and none begins before it has ended.

    folder: one for all processes of a test run.
    """
    with ExitStack() as door, (folder / "running.lock").open("a") as running:
        # Who comes next passes the door; who waits to be alone keeps it shut, or others would go in for ever.
        waiting = door.enter_context((folder / "door.lock").open("a"))
        fcntl.flock(waiting, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            door.close()
        yield
