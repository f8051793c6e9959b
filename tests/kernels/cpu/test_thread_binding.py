"""Threads of the C++ kernels move to the CPUs that they are bound to, and their caller stays where it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.kernels.cpu import library

CPUS = sorted(os.sched_getaffinity(0))

PROGRAM = """
import os, torch
from quire.kernels.cpu import library, ops
from pathlib import Path

def places():
    tasks = [path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text() == "quire-kernel\\n"]
    return sorted(sorted(os.sched_getaffinity(int(task.name))) for task in tasks)

cpu = ops.CpuOps(torch.float32)
packed = cpu.pack_linear(torch.randn(4096, 512))
x, want = torch.randn(64, 512), None
cpus = sorted(os.sched_getaffinity(0))
library.set_num_threads(3)

def jobs():
    global want
    for _ in range(200):
        out = cpu.linear(x, packed)
    want = out if want is None else want
    assert torch.equal(out, want)
    return places()

print(jobs() == [cpus, cpus])
library.bind_threads([[cpus[0]], [cpus[-1]], [cpus[0]]])
print(jobs() == sorted([[cpus[-1]], [cpus[0]]]), sorted(os.sched_getaffinity(0)) == cpus)
library.unbind_threads()
print(jobs() == [cpus, cpus])
"""


@pytest.mark.slow
@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_bound_threads_run_on_their_cpus() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\nTrue True\nTrue\n", "")


def test_a_thread_needs_a_cpu() -> None:
    with pytest.raises(ValueError, match="at least one CPU"):
        library.bind_threads([[0], []])
    with pytest.raises(ValueError, match="at least one CPU"):
        library.bind_threads([])


@pytest.mark.slow
def test_memory_can_be_spread_over_the_nodes_of_this_machine() -> None:
    """In a container the system may refuse; a node that does not exist is always refused."""
    program = (
        "from quire.kernels.cpu import library\n"
        "for nodes in ([0], [63]):\n"
        "    try: library.interleave_memory(nodes); print('done')\n"
        "    except OSError as error: print(error.strerror)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first in ("done", "Operation not permitted", "Function not implemented")
    assert second != "done"
