"""A worker that ends, ends with its exit code, whatever its threads do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BUSY = """
import sys, threading, time, torch
from quire.worker.interpreter import leave

def compute():
    x = torch.randn(200, 200)
    while True:
        torch.argmax((x @ x)[:5], 1)

torch.set_num_threads(1)
threading.Thread(target=compute, daemon=True).start()
time.sleep(0.2)
print("the last line")
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_thread_inside_of_torch_does_not_abort_the_process_at_its_end(code: int) -> None:
    command = [sys.executable, "-c", f"{BUSY}\nleave({code})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr) == (code, "the last line\n", "")


RELEASE = """
from pathlib import Path
from quire.worker.interpreter import release_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

blocks = [bytearray(60_000) for _ in range(2000)]  # below the size that malloc maps
keep = blocks[-1]
blocks = None
before = resident()
release_free_memory()
print(before - resident() > 80)
"""


def test_memory_that_malloc_keeps_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
