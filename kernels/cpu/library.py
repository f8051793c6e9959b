"""The C++ library as Python sees it: instruction-set levels, and functions with their C types.

Pointers cross as integers (`Tensor.data_ptr()`); ctypes releases the GIL for the length of a call.
"""

import ctypes
import os
from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p
from enum import IntEnum
from functools import cache

import torch


class KernelsUnavailable(RuntimeError):
    """The C++ kernels cannot be had here; the message names the remedy."""


class Level(IntEnum):
    """Instruction-set levels, in the order in which the library numbers them."""

    avx2 = 0
    avx512 = 1
    avx512bf16 = 2
    amx = 3


# Best first. Each level computes with one type of activation.
LEVELS = {torch.bfloat16: [Level.amx, Level.avx512bf16], torch.float32: [Level.avx512, Level.avx2]}

_SIZE, _POINTER = c_size_t, c_void_p
_SIGNATURES = {
    "linear": (None, [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, c_int]),
    "rms_norm": (None, [_POINTER, _POINTER, _POINTER, c_float, _SIZE, _SIZE, _POINTER]),
    "embed": (c_int64, [_POINTER, c_int, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER]),
    "rope_and_cache": (c_int64, [_POINTER] * 9 + [_SIZE] * 7 + [c_float, c_int]),
    "paged_attention": (c_int64, [_POINTER] * 7 + [_SIZE] * 4 + [c_int] * 5 + [c_float]),
    "layers": (c_int64, [_POINTER]),
    "argmax": (None, [_POINTER, _SIZE, _SIZE, _POINTER]),
    "sample": (None, [_POINTER, _SIZE, _SIZE] + [_POINTER] * 6),
    "top_logprobs": (None, [_POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER]),
    "logprobs_of": (c_int64, [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER]),
}
# Moves of bytes are the same at every level: caches and how many, bytes of a block, src, dst and how many.
_BLOCKS = [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE]

_RANKS = {
    "bytes": (_SIZE, [_SIZE]),
    "open": (_POINTER, [_POINTER, _SIZE, _SIZE]),
    "give_up": (None, [_POINTER]),
    "all_reduce": (c_int, [_POINTER, _POINTER, _SIZE, _SIZE]),
    "broadcast": (c_int, [_POINTER, _POINTER, _SIZE]),
    "gather": (c_int, [_POINTER, _POINTER, _SIZE, _POINTER]),
}


@cache
def load() -> ctypes.CDLL:
    """Builds if needed, and loads. Raises Unavailable."""
    from quire.kernels.cpu import build  # not above: `python -m quire.kernels.cpu.build` imports this package first

    library = ctypes.CDLL(str(build.build()))
    library.quire_pack.argtypes = [_POINTER, _SIZE, _SIZE, c_int, c_int, _POINTER]
    library.quire_pack.restype = None
    library.quire_copy_blocks.argtypes = _BLOCKS
    library.quire_swap_out.argtypes = library.quire_swap_in.argtypes = [*_BLOCKS, _POINTER]
    for function in (library.quire_copy_blocks, library.quire_swap_out, library.quire_swap_in):
        function.restype = None
    for name, (result, arguments) in _RANKS.items():
        function = getattr(library, f"quire_ranks_{name}")
        function.restype, function.argtypes = result, arguments
    library.quire_set_threads.argtypes = [c_int]
    library.quire_set_threads.restype = None
    library.quire_set_threads(len(os.sched_getaffinity(0)))
    for level in Level:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"{level.name}_{name}")
            function.restype, function.argtypes = result, arguments
    return library


def best_level(dtype: torch.dtype) -> Level:
    """The best level that this processor runs for activations of `dtype`. Raises Unavailable where there is none.

    The environment variable KERNELS_CPU_ISA names a level above which none is used, or `none`.
    """
    limit = os.environ.get("KERNELS_CPU_ISA", "")
    if limit == "none":
        raise KernelsUnavailable("KERNELS_CPU_ISA is none: unset it")
    if limit and limit not in Level.__members__:
        raise ValueError(f"KERNELS_CPU_ISA is {limit!r}: it must be one of {', '.join(Level.__members__)} or none")
    if dtype not in LEVELS:
        raise KernelsUnavailable(f"there are none for {dtype}: use {' or '.join(map(str, LEVELS))}")
    library = load()
    highest = Level[limit] if limit else max(Level)
    for level in LEVELS[dtype]:
        if level <= highest and library.quire_has_level(int(level)):
            return level
    needed = " or ".join(level.name for level in LEVELS[dtype])
    raise KernelsUnavailable(
        f"{dtype} needs {needed}, which this processor lacks: use torch.float32 where it is bfloat16"
    )
