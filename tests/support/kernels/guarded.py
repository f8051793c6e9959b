"""Memory for weights and caches between two inaccessible pages.

A kernel that reads or writes outside ends the process with a segmentation fault. pytest prints the test.
"""

import ctypes
import weakref

import torch

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
