"""The recorder of accesses finds each kind of wrong access. All kernel tests run with it."""

import signal
import subprocess
import sys

import pytest
import torch

from tests.support.kernels.fixtures import PAGE, guarded
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA

if not HAS_TRITON or ON_CUDA:
    pytest.skip("only Triton's interpreter is watched", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@pytest.fixture(autouse=True)
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


WIDTH = 128  # values of a program: as many as it has threads


@InterpretedFunction
def shift_kernel(values, out, by, count, again, WIDTH: tl.constexpr):
    """out[i] = values[i + by] for `count` values, and once more from `out` if `again`. grid (cdiv(count, WIDTH),)"""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + i, tl.load(values + i + by, mask=i < count), mask=i < count)
    if again:
        tl.store(out + i, tl.load(out + i, mask=i < count), mask=i < count)


@InterpretedFunction
def sum_kernel(values, out, WIDTH: tl.constexpr):
    """All programs, and all their threads, write to the same place."""
    i = tl.arange(0, WIDTH)
    tl.store(out + i * 0, tl.load(values + i))


@InterpretedFunction
def all_kernel(values, out, count, WIDTH: tl.constexpr):
    """`out` has WIDTH values, and `values` has `count`."""
    i = tl.arange(0, WIDTH)
    tl.store(out + i, tl.load(values + i, mask=i < count))


@InterpretedFunction
def count_kernel(values, counts, out, plain, WIDTH: tl.constexpr):
    """Count each value. If `plain`, the first program also reads the counts. grid (n,)"""
    value = tl.load(values + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH))
    tl.atomic_add(counts + value, 1, sem="relaxed")
    if plain & (tl.program_id(0) == 0):
        tl.store(out, tl.load(counts))


def shift(values: torch.Tensor, out: torch.Tensor, by: int = 0, width: int = WIDTH, again: int = 0, **options) -> None:
    count = len(values)
    shift_kernel[(triton.cdiv(count, width),)](values, out, by, count, again, WIDTH=width, **options)


def test_what_is_right_passes() -> None:
    values = torch.arange(2.0 * WIDTH)
    out = torch.empty_like(values)
    shift(values, out)
    assert torch.equal(out, values)
    shift(out, out)
    assert torch.equal(out, values)


def test_memory_of_no_tensor() -> None:
    values = torch.zeros(WIDTH)
    with pytest.raises(AssertionError, match="shift_kernel: a program touches what belongs to no tensor"):
        shift(values, torch.zeros(WIDTH), by=1 << 40)
    with pytest.raises(AssertionError, match="belongs to no tensor"):
        shift(values, torch.zeros(WIDTH - 1))


def test_programs_that_read_what_others_write() -> None:
    values = torch.zeros(2 * WIDTH + 1)
    with pytest.raises(AssertionError, match="a program reads what another one writes"):
        shift(values[:-1], values[:-1], by=1)


def test_programs_and_threads_that_write_to_one_place() -> None:
    values, out = torch.zeros(WIDTH), torch.zeros(1)
    with pytest.raises(AssertionError, match="sum_kernel: one store writes to a place twice"):
        sum_kernel[(1,)](values, out, WIDTH=WIDTH)
    with pytest.raises(AssertionError, match="two programs write to one place"):
        sum_kernel[(2,)](values, out, WIDTH=1, num_warps=1)


def test_a_program_that_reads_what_it_wrote() -> None:
    with pytest.raises(AssertionError, match="a program reads what it has written"):
        shift(torch.zeros(WIDTH), torch.zeros(WIDTH), again=1)


def test_threads_that_share_a_value_which_is_replaced() -> None:
    values = torch.zeros(WIDTH)
    shift(values, values, width=64, num_warps=2)
    with pytest.raises(AssertionError, match="a program writes where several of its threads have read"):
        shift(values, values, width=64)


def test_what_a_load_leaves_out_is_garbage() -> None:
    values = torch.zeros(WIDTH - 1)
    out = torch.zeros(WIDTH)
    all_kernel[(1,)](values, out, len(values), WIDTH=WIDTH)
    assert out[-1].isnan()
    assert not out[:-1].any()


def test_atomic_operations_may_meet_but_no_other_access_may_meet_them() -> None:
    values, counts = torch.arange(2 * WIDTH) % 5, torch.zeros(5, dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    count_kernel[(2,)](values, counts, out, 0, WIDTH=WIDTH)
    assert torch.equal(counts, torch.bincount(values).int())
    with pytest.raises(AssertionError, match="count_kernel: an atomic operation meets another access"):
        count_kernel[(2,)](values, counts, out, 1, WIDTH=WIDTH)


# --- guarded ----------------------------------------------------------------------------------------------------------
# The guards around the memory that kernel tests use (conftest.py) are there.

# Touches a byte in a process of its own, and prints how that ends.
TOUCH = """
import ctypes, os
from tests.support.kernels.fixtures import guarded
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
