"""Child processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_DIE_WITH_PARENT = str(Path(__file__).with_name("die_with_parent.py"))


def spawn(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    output: IO[bytes] | None,
    death_signal: signal.Signals = signal.SIGKILL,
    keep: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, so that Ctrl-C at the terminal reaches the parent only.

    When the parent dies for any reason, the child gets `death_signal` (Linux). The kernel watches the *thread* that
    calls this: call it from the main thread. output: None for the parent's standard output. keep: file descriptors that
    the child inherits.
    """
    return subprocess.Popen(
        dying_with_parent(command, death_signal),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=keep,
    )


def dying_with_parent(command: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command wrapped so that its process gets the signal when this process dies."""
    return [sys.executable, "-I", "-S", _DIE_WITH_PARENT, str(int(death_signal)), str(os.getpid()), *command]
