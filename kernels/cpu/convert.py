"""Copies of stored weights, converted to the dtype of the model and checked in one pass of the C++ kernels' threads.

torch would convert, check and concatenate in three passes with threads of its own. These threads wait for each other
actively: while another process uses a core, each pass takes milliseconds instead of microseconds.
"""

import torch
from torch import Tensor

from quire.kernels.cpu import library

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `Type` in convert.cpp


def copy_finite(source: Tensor, out: Tensor) -> bool:
    """Copy `source` to `out`, of the same shape, rounded to even. Returns whether all values of `out` are finite.

    Without the C++ library, for tensors that are not contiguous and for other dtypes, torch copies.
    """
    if source.shape != out.shape:
        raise ValueError(f"source is {list(source.shape)}, and out is {list(out.shape)}")
    if _fits(source) and _fits(out) and library.is_loaded():
        types = _TYPES[source.dtype], _TYPES[out.dtype]
        addresses = source.data_ptr(), out.data_ptr()
        done: int = library.load().common.convert(addresses[0], types[0], addresses[1], types[1], source.numel())
        if done >= 0:
            return bool(done)
    out.copy_(source)
    low, high = out.aminmax() if out.numel() else (out.new_zeros(()),) * 2  # NaN if any value is
    return bool(low.isfinite() and high.isfinite())


def _fits(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in _TYPES
