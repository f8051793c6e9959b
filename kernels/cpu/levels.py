"""The instruction-set levels of the C++ kernels, and the choice of one. Each has a source file, level_NAME.cpp."""

import os
from enum import IntEnum

import torch

from quire.kernels.cpu import library
from quire.kernels.ops import KernelsUnavailable


class Level(IntEnum):
    """Instruction-set levels in ascending order. level_NAME.cpp names the instructions of each."""

    avx2 = 0
    avx512 = 1
    avx512vnni = 2
    avx512bf16 = 3
    amxint8 = 4
    amx = 5

    @property
    def functions(self) -> library.LevelFunctions:
        """The functions of this level, which need a processor of this level. Raises KernelsUnavailable."""
        return library.load().level(self.name)

    @property
    def is_supported(self) -> bool:
        """True if this processor and operating system run the level. Raises KernelsUnavailable without the library."""
        return bool(library.load().common.supports(self))


# The levels for each dtype of activations, best first. A level has kernels for one dtype only.
# The levels with float activations give the same bits; those with better integer products are faster with quantised
# weights alone.
LEVELS = {
    torch.bfloat16: [Level.amx, Level.avx512bf16],
    torch.float32: [Level.amxint8, Level.avx512vnni, Level.avx512, Level.avx2],
}


def best_level(dtype: torch.dtype) -> Level:
    """Return the best level that this processor runs for activations of `dtype`.

    The environment variable KERNELS_CPU_ISA names the highest level to use, or `none`.
    Raises KernelsUnavailable if there is no such level, and ValueError for another value of KERNELS_CPU_ISA.
    """
    limit = os.environ.get("KERNELS_CPU_ISA", "")
    if limit == "none":
        raise KernelsUnavailable("KERNELS_CPU_ISA is none: unset it")
    if limit and limit not in Level.__members__:
        raise ValueError(f"KERNELS_CPU_ISA is {limit!r}: it must be one of {', '.join(Level.__members__)} or none")
    if dtype not in LEVELS:
        raise KernelsUnavailable(f"the C++ kernels do not support {dtype}: use {' or '.join(map(str, LEVELS))}")
    highest = Level[limit] if limit else max(Level)
    for level in LEVELS[dtype]:
        if level <= highest and level.is_supported:
            return level
    needed = " or ".join(level.name for level in LEVELS[dtype])
    raise KernelsUnavailable(
        f"{dtype} needs {needed}, which this processor lacks: use torch.float32 where it is bfloat16"
    )
