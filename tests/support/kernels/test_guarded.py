"""The guards around the memory that kernel tests use (conftest.py) are there."""

import signal
import subprocess
import sys

import pytest
import torch

from tests.support.kernels.guarded import PAGE, guarded

TOUCH = """
import ctypes
from tests.support.kernels.guarded import guarded
x = guarded({})
ctypes.string_at(x.data_ptr() + {}, 1)
"""


@pytest.mark.parametrize(("size", "offset", "dies"), [(64, 63, False), (64, 64, True), (4096, -1, True)])
def test_a_touch_outside_ends_the_process(size, offset, dies):
    done = subprocess.run([sys.executable, "-c", TOUCH.format(size, offset)])
    assert done.returncode == (-signal.SIGSEGV if dies else 0)


def test_weights_and_caches_lie_in_it(cpu_ops):
    weight = cpu_ops.pack_linear(torch.ones(32, 100).to(cpu_ops.dtype)).weight
    k_cache, v_cache = cpu_ops.alloc_kv_cache(3, 1, 8, 16)
    for tensor in (weight, k_cache, v_cache):
        assert (tensor.data_ptr() + tensor.nbytes) % PAGE == 0
    assert guarded(100).sum() == 0
