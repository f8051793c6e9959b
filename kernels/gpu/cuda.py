"""Two defaults of torch on CUDA that this package replaces: partial sums in 16 bits, and how host memory is pinned.

Imports no Triton.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Protocol

import torch


def accumulate_in_float32() -> None:
    """Forbid cuBLAS, in this process, to add the partial sums of a split K in 16 bits.

    Torch allows it by default. Each partial sum is rounded then, but `quire.kernels.ops.Ops.linear` promises one
    rounding.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class PinningFailed(RuntimeError):
    """The CUDA driver cannot pin host memory of the requested size. The message names the size and the cause."""


class Runtime(Protocol):
    """The part of the CUDA runtime that pins memory. Each call returns a cudaError_t; 0 is success."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


class _Pinned(mmap.mmap):
    """An anonymous mapping that is unpinned before it is unmapped."""

    unpin: Callable[[], int] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def pinned_bytes(size: int, runtime: Runtime | None = None) -> torch.Tensor:
    """Map and pin `size` bytes of host memory, rounded up to whole pages.

    Torch's allocator of pinned memory rounds up to a power of two: for 20 GiB it pins 32 GiB.

    runtime: torch's binding of the CUDA runtime if None.
    Returns uint8 [size], zeroed and page-aligned. The memory is unpinned when its last view is dropped. No copy from or
    to it may be in progress then. Raises PinningFailed.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    said = f"{pages / 2**30:.2f} GiB of host memory"
    try:
        memory = _Pinned(-1, pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PinningFailed(f"{said} cannot be mapped ({error.strerror})") from error
    data = torch.frombuffer(memory, dtype=torch.uint8)  # refers to `memory`
    driver: Runtime = torch.cuda.cudart() if runtime is None else runtime  # type: ignore[no-untyped-call]
    address = data.data_ptr()
    if code := int(driver.cudaHostRegister(address, pages, 0)):
        raise PinningFailed(f"{said} cannot be pinned (cudaHostRegister returns error {code})")
    memory.unpin = lambda: driver.cudaHostUnregister(address)
    return data[:size]
