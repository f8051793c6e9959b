"""The pipe through which a child of `quire serve` reports the progress of its start: one line per phase.

A line is `PHASE`, or `PHASE<tab>PERCENT`. `worker/progress.py` reports the phases of a worker; a gateway has one.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from contextlib import suppress

# The environment variable with the descriptor of the pipe's writing end.
PIPE = "_QUIRE_PROGRESS_FD"
# The last phase: the process serves.
READY = "ready"
# Begins the last phase of a worker whose model cannot be loaded; the reason follows.
FAILED = "cannot be loaded: "


def report_ready(environ: MutableMapping[str, str]) -> None:
    """Report that the process serves, and close the pipe. Do nothing in a process that has no pipe."""
    descriptor = environ.pop(PIPE, "")
    if not descriptor.isdigit():
        return
    with suppress(OSError):  # `quire serve` has ended, and this process will end too
        os.write(int(descriptor), f"{READY}\n".encode())
        os.close(int(descriptor))
