"""Fixtures of kernel tests. The conftest.py of each folder with kernel tests imports them."""

import ctypes
import os
import weakref

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from quire.kernels.cpu.memory import Arena
from tests.support.kernels.implementations import (
    ON_CUDA,
    TRITON_DTYPES,
    implementations,
    make_ops,
    make_triton_ops,
    of_narrow_caches,
)

# --- guarded ----------------------------------------------------------------------------------------------------------
# Memory for weights and caches between two inaccessible pages.
#
# A kernel that reads or writes outside ends the process with a segmentation fault. pytest prints the test.

PAGE = 4096
_LINE = 64  # alignment that kernels may rely on
_NO_ACCESS, _READ_WRITE, _PRIVATE_ANONYMOUS = 0, 3, 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def guarded(size: int) -> torch.Tensor:
    """Return zeroed [size] uint8 that begins at a multiple of 64 and ends less than 64 bytes before a guard page."""
    used = -(-size // _LINE) * _LINE
    pages = -(-used // PAGE) * PAGE
    whole = pages + 2 * PAGE
    base = _libc.mmap(None, whole, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    for guard in (base, base + PAGE + pages):
        if _libc.mprotect(guard, PAGE, _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    memory = (ctypes.c_uint8 * size).from_address(base + PAGE + pages - used)
    weakref.finalize(memory, _libc.munmap, base, whole)
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture(params=TRITON_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def gpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    """The Triton kernels alone, in every dtype. Tests with small shapes use this fixture in the interpreter too."""
    return make_triton_ops(request.param, monkeypatch)


@pytest.fixture(params=implementations())
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops(*request.param, monkeypatch)


@pytest.fixture(params=[p for p in implementations() if p.values[0][0] == "cpu"])
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops(*request.param, monkeypatch)


@pytest.fixture(
    params=[(level.name, dtype) for dtype, levels in LEVELS.items() for level in levels], ids=lambda param: param[0]
)
def level_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    """The C++ kernels of every level, with the activations of the level. Those that the processor lacks are skipped."""
    return make_ops("cpu", *request.param, monkeypatch)


@pytest.fixture(params=of_narrow_caches())
def narrow_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    """The implementations for a CPU with a KV cache of another type than the activations."""
    kind, level, dtype, kv_dtype = request.param
    return make_ops(kind, level, dtype, monkeypatch, kv_dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)
    if not ON_CUDA:
        torch.use_deterministic_algorithms(True)  # torch.empty then returns NaN, or the largest integer
    yield
    torch.set_default_device(None)
    if ON_CUDA:
        end_if_lost()
    else:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process if a C++ kernel reads or writes outside of its weights or caches."""
    monkeypatch.setattr(Arena, "take", lambda arena, size, apart=False: guarded(size))


def end_if_lost() -> None:
    """End a process of pytest-xdist after an error on the device.

    Every later call in this process would fail. pytest-xdist starts another process for the remaining tests.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(3)  # the result of the test has been sent already
        raise


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    """Run torch on one thread: the tensors are so small that threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads():
    """Set the number of kernel threads for one test. The first call builds the C++ kernels, if a compiler is there."""
    before: list[int] = []

    def change(count: int) -> None:
        try:
            before.append(kernels.num_threads())
        except kernels.KernelsUnavailable:  # no compiler; other implementations have no thread setting
            return
        kernels.set_num_threads(count)

    yield change
    if before:
        kernels.set_num_threads(before[0])
