"""Rounds weights to the K-quants of GGUF by the range of each group, for tests and measurements.

llama.cpp searches for the scales with the least error; these are a little worse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 256


def q2_k(values: Array) -> Array:
    d, dmin, scales, offsets, integers = _with_offsets(values, 16, 3, 15)
    quarters = integers.reshape(-1, 2, 4, 32)
    packed = (quarters << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    return _joined(values, scales | (offsets << 4), packed.reshape(-1, 64), d, dmin)


def q3_k(values: Array) -> Array:
    d, scales, integers = _symmetric(values, 4, 32)
    scales, integers = (scales + 32).astype(np.uint8), (integers + 4).astype(np.uint8)
    quarters = (integers & 3).reshape(-1, 2, 4, 32)
    low = (quarters << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    bits = (integers >> 2).reshape(-1, 8, 32)
    high = (bits << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    halves = (scales[:, :8] & 15) | ((scales[:, 8:] & 15) << 4)
    tops = ((scales >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    return _joined(values, high, low.reshape(-1, 64), halves, tops, d)


def q4_k(values: Array) -> Array:
    d, dmin, scales, offsets, integers = _with_offsets(values, 32, 15, 63)
    pairs = integers.reshape(-1, 4, 2, 32)
    return _joined(
        values, d, dmin, _six_bits(scales, offsets), (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    )


def q5_k(values: Array) -> Array:
    d, dmin, scales, offsets, integers = _with_offsets(values, 32, 31, 63)
    bits = (integers >> 4).reshape(-1, 8, 32)
    high = (bits << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    pairs = (integers & 15).reshape(-1, 4, 2, 32)
    low = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return _joined(values, d, dmin, _six_bits(scales, offsets), high, low)


def q6_k(values: Array) -> Array:
    d, scales, integers = _symmetric(values, 32, 128)
    integers = (integers + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (integers[:, :, :2] & 15) | ((integers[:, :, 2:] & 15) << 4)
    high = ((integers >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    return _joined(values, low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), d)


QUANTIZERS: dict[str, Callable[[Array], Array]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}


def _symmetric(values: Array, levels: int, scale_levels: int) -> tuple[Array, Array, Array]:
    """Return d as bytes, signed scales int8 [B, 16], and integers [B, 16, 16] from -levels to levels - 1."""
    groups = values.astype(np.float32).reshape(-1, BLOCK // 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0]
    wanted = largest / -levels
    d = (np.abs(wanted).max(axis=1, keepdims=True) / (scale_levels - 1)).astype(np.float16)
    scales = np.clip(np.round(_divided(wanted, d)), -scale_levels, scale_levels - 1)
    integers = np.clip(np.round(_divided(groups, (d * scales)[..., None])), -levels, levels - 1)
    return d.view(np.uint8), scales.astype(np.int8), integers.astype(np.int8)


def _with_offsets(values: Array, size: int, levels: int, scale_levels: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return d and dmin as bytes, scales and offsets uint8 [B, groups], and integers uint8 [B, groups, size]."""
    groups = values.astype(np.float32).reshape(-1, BLOCK // size, size)
    lowest = np.minimum(groups.min(axis=2), 0)
    wanted = (groups.max(axis=2) - lowest) / levels
    d = (wanted.max(axis=1, keepdims=True) / scale_levels).astype(np.float16)
    dmin = ((-lowest).max(axis=1, keepdims=True) / scale_levels).astype(np.float16)
    scales = np.clip(np.round(_divided(wanted, d)), 0, scale_levels)
    offsets = np.clip(np.round(_divided(-lowest, dmin)), 0, scale_levels)
    integers = np.clip(np.round(_divided(groups + (dmin * offsets)[..., None], (d * scales)[..., None])), 0, levels)
    return d.view(np.uint8), dmin.view(np.uint8), *(part.astype(np.uint8) for part in (scales, offsets, integers))


def _divided(values: Array, by: Array) -> Array:
    by = by.astype(np.float32)
    return np.divide(values, by, out=np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32), where=by != 0)


def _six_bits(scales: Array, offsets: Array) -> Array:
    """Pack 8 scales and 8 offsets of 6 bits in 12 bytes."""
    first = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    second = (offsets[:, :4] & 63) | ((offsets[:, 4:] >> 4) << 6)
    return np.concatenate((first, second, (scales[:, 4:] & 15) | ((offsets[:, 4:] & 15) << 4)), axis=1)


def _joined(values: Array, *parts: Array) -> Array:
    """Return the parts of each block side by side, as rows of bytes."""
    return np.concatenate([part.reshape(len(parts[0]), -1) for part in parts], axis=1).reshape(*values.shape[:-1], -1)
