"""Two defaults of torch on CUDA are replaced: sums in 16 bits, and pinned memory rounded up to a power of two."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
from collections.abc import Iterator

import pytest
import torch

from quire import kernels
from quire.kernels.gpu.cuda import pinned_bytes
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops
from tests.support.kernels.stacks import make_cache_stack

CUDA = torch.device("cuda", 0)
MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def reduced() -> Iterator[None]:
    """Allow sums in 16 bits, torch's default, and restore the setting after the test."""
    before = MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction
    MATMUL.allow_bf16_reduced_precision_reduction = MATMUL.allow_fp16_reduced_precision_reduction = True
    yield
    MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction = before


def are_reduced() -> tuple[bool, bool]:
    return MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction


@pytest.mark.usefixtures("reduced")
def test_sums_of_products_on_cuda_are_taken_in_float32() -> None:
    kernels.ReferenceOps("cpu", torch.bfloat16)
    assert are_reduced() == (True, True), "a CPU has no such setting: the process is left alone"
    kernels.ReferenceOps(CUDA, torch.bfloat16)
    assert are_reduced() == (False, False)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.usefixtures("reduced")
def test_the_triton_kernels_take_sums_of_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_triton_ops(torch.float32, monkeypatch).device
    MATMUL.allow_bf16_reduced_precision_reduction = MATMUL.allow_fp16_reduced_precision_reduction = True
    kernels.triton_ops(device, torch.float32)  # workers and `make gpu-check` call this function
    assert are_reduced() == (False, False)


class Runtime:
    """Stand-in for the CUDA runtime that records pinned memory. code: the return code of pinning."""

    def __init__(self, code: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.code = code

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.memset(address, 1, 1)  # the memory is still mapped
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("size", [3, 4096, 5 << 20, (1 << 30) + 4096])
def test_memory_is_pinned_as_large_as_it_is_asked_for(size: int) -> None:
    runtime = Runtime()
    memory = pinned_bytes(size, runtime)
    assert memory.shape == (size,)
    [(address, pinned)] = runtime.pinned.items()
    assert address == memory.data_ptr()
    assert address % mmap.PAGESIZE == 0
    assert size <= pinned < size + mmap.PAGESIZE
    memory[-1] = 7
    assert memory[0] == 0


@pytest.mark.slow
def test_memory_is_unpinned_with_its_last_view_and_before_it_is_unmapped() -> None:
    runtime = Runtime()
    view = pinned_bytes(1 << 20, runtime).view(torch.bfloat16)[5:]
    gc.collect()
    assert runtime.pinned
    del view
    gc.collect()
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_an_error_with_its_size() -> None:
    with pytest.raises(kernels.PinningFailed, match=r"3.00 GiB of host memory cannot be pinned .*error 2\)"):
        pinned_bytes(3 << 30, Runtime(code=2))
    with pytest.raises(kernels.PinningFailed, match="of host memory cannot be mapped"):
        pinned_bytes(1 << 62, Runtime())


def test_nothing_is_pinned_for_no_bytes() -> None:
    assert pinned_bytes(0, Runtime(code=2)).shape == (0,)


@pytest.mark.skipif(ON_CUDA, reason="the CUDA runtime is replaced")
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_the_pool_of_swapped_blocks_is_pinned_as_large_as_it_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    is_triton, runtime = kind == "triton", Runtime()
    ops = make_triton_ops(torch.float32, monkeypatch) if is_triton else kernels.ReferenceOps("cpu", torch.float32)
    stack, _ = make_cache_stack(ops, 2)
    assert not runtime.pinned
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    ops.device = CUDA
    block = ops.alloc_host_blocks(stack, 1)
    count = 5 * (1 << 20) // block.nbytes  # not a power of two
    host = ops.alloc_host_blocks(stack, count)
    ops.device = torch.device("cpu")
    assert host.shape == (count, *block.shape[1:])
    assert host.dtype is torch.float32
    assert host.nbytes == math.prod(host.shape) * 4
    assert runtime.pinned[host.data_ptr()] == -(-host.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def test_a_card_pins_what_this_module_pins() -> None:
    """Torch recognises the memory as pinned, and so copies from it without waiting."""
    if not ON_CUDA:
        pytest.skip("needs a CUDA device")
    memory = pinned_bytes(5 << 20)
    assert memory.is_pinned()
