from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from quire.shared import die_with_parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")

# Starts a child that dies with this process, says its pid, and is killed itself.
PARENT = """
import os, signal, subprocess, sys
from quire.shared.processes import dying_with_parent
sleeper = "print('up', flush=True); import time; time.sleep(60)"
child = subprocess.Popen(dying_with_parent([sys.executable, "-c", sleeper]), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_dies_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        # The child has inherited no end of this pipe: it ends with the parent.
        parent.wait(30)
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)


def test_a_parent_that_has_died_before_ends_the_child_at_once() -> None:
    command = [sys.executable, "-I", "-S", die_with_parent.__file__, "9", "1", "/bin/true"]
    assert subprocess.run(command, check=False).returncode == (0 if os.getpid() == 1 else 1)


def is_alive(pid: int) -> bool:
    """Return False also for a zombie, a process that has ended and was not waited for."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
