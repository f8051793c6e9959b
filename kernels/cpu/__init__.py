"""The operations of kernels/ops.py in C++ for x86-64."""

from quire.kernels.cpu.library import Unavailable
from quire.kernels.cpu.ops import CpuOps

__all__ = ["CpuOps", "Unavailable"]
