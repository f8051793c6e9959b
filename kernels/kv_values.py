"""Keys and values in the types of the KV cache: the definition of what a cache stores, in plain torch.

A row is the key or the value of one token and one kv head. The stored bytes of a row depend on that row alone.
"""

import torch
from torch import Tensor

from quire.kernels.checks import SCALE_BYTES

FP8_LARGEST = 448.0
INT8_LARGEST = 127.0


def encode(rows: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Return rows [..., D] of activations as a cache of `kv_dtype` stores them: [..., D], or [..., D + 4] for int8."""
    if kv_dtype is torch.int8:
        return _encode_int8(rows.float())
    if kv_dtype is torch.float8_e4m3fn:
        return rows.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(kv_dtype)
    return rows.to(kv_dtype)


def _encode_int8(rows: Tensor) -> Tensor:
    largest = rows.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, INT8_LARGEST) / largest, 0.0)
    integers = (rows * inverse).nan_to_num(nan=-INT8_LARGEST).round().clamp(-INT8_LARGEST, INT8_LARGEST)
    scale = (largest / INT8_LARGEST).contiguous().view(torch.int8)
    return torch.cat([integers.to(torch.int8), scale], dim=-1)


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `encode`, [..., D] of `dtype`."""
    if stored.dtype is not torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return stored[..., :-SCALE_BYTES].to(dtype) * scale.to(dtype)
