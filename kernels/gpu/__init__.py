"""The operations of kernels/ops.py in Triton for CUDA devices.

Importing this package needs Triton; nothing else of the project does. The folder is not called `triton`, so that no
path can shadow the compiler.
"""

from quire.kernels.gpu.limits import Unsupported
from quire.kernels.gpu.ops import TritonOps

__all__ = ["TritonOps", "Unsupported"]
