"""Turns of tests that run in parallel processes. Some tests need the machine alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Hold a turn for one test.

    alone: the test waits until no other test runs, and no other test starts before this test ends.
    folder: shared by all processes of a test run.
    """
    with ExitStack() as door, (folder / "running.lock").open("a") as running:
        # A test that waits to be alone locks the door file, so that no further test starts in the meantime.
        waiting = door.enter_context((folder / "door.lock").open("a"))
        fcntl.flock(waiting, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            door.close()
        yield
