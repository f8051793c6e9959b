"""The guards around the memory that kernel tests use (conftest.py) are there."""

import signal
import subprocess
import sys

import pytest
import torch

from tests.support.kernels.guarded import PAGE, guarded

# Touches a byte in a process of its own, and prints how that ends.
TOUCH = """
import ctypes, os
from tests.support.kernels.guarded import guarded
for size, offset in ((64, 63), (64, 64), (4096, -1)):
    child = os.fork()
    if not child:
        x = guarded(size)
        ctypes.string_at(x.data_ptr() + offset, 1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_touch_outside_ends_the_process():
    done = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True, check=True)
    assert [int(code) for code in done.stdout.split()] == [0, -signal.SIGSEGV, -signal.SIGSEGV]


def test_weights_and_caches_lie_in_it(cpu_ops):
    weight = cpu_ops.pack_linear(torch.ones(32, 100).to(cpu_ops.dtype)).weight
    k_cache, v_cache = cpu_ops.alloc_kv_cache(3, 1, 8, 16)
    for tensor in (weight, k_cache, v_cache):
        assert (tensor.data_ptr() + tensor.nbytes) % PAGE == 0
    assert guarded(100).sum() == 0
