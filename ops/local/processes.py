"""Waiting for child processes, and locks that end with their holder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def wait_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float, hurry: Callable[[], bool]) -> bool:
    """Wait until all processes have ended. Return False after `timeout_s`, or as soon as `hurry()` is true."""
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or hurry():
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    """Return whether a process with this pid exists, of any user."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


class FileLock:
    """An exclusive lock on a file. The holder can write a text into the file, such as its pid.

    The kernel releases the lock when the last process that has `fd` open ends, so a lock is never stale.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Try to take the lock for `timeout_s`. Return whether this process holds it now."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)

    def write(self, text: str) -> None:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, text.encode(), 0)

    def read(self) -> str:
        return os.pread(self.fd, 4096, 0).decode(errors="replace").strip()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
