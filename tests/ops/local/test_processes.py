"""Locks that end with their holder, and waiting for processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quire.ops.local.processes import FileLock, is_running, wait_all


def test_a_lock_is_held_by_one_and_free_after_its_end(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    first.write("a longer text")
    first.write("me")
    assert not second.acquire()
    assert second.read() == "me"
    first.close()
    first.close()
    assert second.acquire()
    second.close()


def test_waiting_ends_in_time_or_when_told_to_hurry() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not wait_all([process], 0.05, lambda: False)
        assert not wait_all([process], 60.0, lambda: True)
        assert is_running(process.pid)
    finally:
        process.communicate(b"\n")
    assert wait_all([process], 0.0, lambda: True)
    assert not is_running(process.pid)
    assert is_running(os.getpid())
