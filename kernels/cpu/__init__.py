"""The operations of kernels/ops.py in C++ for x86-64."""

from quire.kernels.cpu.library import KernelsUnavailable
from quire.kernels.cpu.ops import CpuOps

__all__ = ["CpuOps", "KernelsUnavailable"]
