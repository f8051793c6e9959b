"""No call of torch's vector functions on several threads is a process' first one (kernels/mkl_warmup.py)."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from quire.kernels.mkl_warmup import FUNCTIONS
from quire.ops.paths import PROJECT_ROOT

CALLED = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Note(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            print(function.overloadpacket.__name__, args[0].dtype, args[0].numel())
        return function(*args, **(kwargs or {}))

with Note():
    from quire import kernels
"""

# Enough values for two threads, as a table of rotary embeddings is.
STARTED = """
import hashlib, torch
from quire import kernels
torch.set_num_threads(2)
values = torch.linspace(0.0, 1000.0, 1 << 16)
results = [function(values) for function in (torch.cos, torch.sin, torch.exp, torch.sqrt)]
print(hashlib.sha256(b"".join(one.numpy().tobytes() for one in results)).hexdigest())
"""


def started(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_importing_the_kernels_calls_each_function_on_one_value() -> None:
    output, _ = started(CALLED).communicate(timeout=120)
    called = Counter(output.splitlines())
    for name in FUNCTIONS:
        for dtype in ("float32", "float64"):
            assert called[f"{name} torch.{dtype} 1"] == 1
    assert all(line.endswith(" 1") for line in called), "work for one thread only"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_processes_that_start_on_a_busy_machine_compute_the_same() -> None:
    """Without the first calls about one in a hundred differs; there are 240, eight at a time."""
    digests: Counter[str] = Counter()
    for _ in range(30):
        processes = [started(STARTED) for _ in range(8)]
        digests.update(process.communicate(timeout=300)[0].strip() for process in processes)
    assert len(digests) == 1, digests
    assert len(next(iter(digests))) == 64
