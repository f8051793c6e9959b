"""The number formats of PTX in numpy: views of registers, and conversions of formats that numpy does not have."""

import re

import numpy as np

DTYPES = {
    "pred": np.dtype(bool),
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "bf16": np.dtype("u2"),  # as its bits
    **{f"{name}x2": np.dtype("u4") for name in ("bf16", "f16")},
    "e4m3x2": np.dtype("u2"),
}


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, as bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def halves(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split 32-bit registers into the lower and the upper 16 bits."""
    return (pairs & np.uint32(0xFFFF)).astype(np.uint16), (pairs >> np.uint32(16)).astype(np.uint16)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Join two 16-bit values in a 32-bit register."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def decode_16(bits: np.ndarray, name: str) -> np.ndarray:
    """Return 16-bit values as float32. name: "bf16" or "f16"."""
    return from_bf16(bits) if name == "bf16" else bits.view(np.float16).astype(np.float32)


def encode_16(values: np.ndarray, name: str) -> np.ndarray:
    """Round float32 to 16-bit values, as bits. name: "bf16" or "f16"."""
    return to_bf16(values) if name == "bf16" else values.astype(np.float16).view(np.uint16)


def from_tf32(bits: np.ndarray) -> np.ndarray:
    """Return 32-bit registers with tf32 as float32. A product ignores the lower 13 bits."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def to_tf32(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest tf32 (10 bits of mantissa), ties away from zero, as the bits of a float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), rounded)


def elements(registers: np.ndarray, name: str) -> list[np.ndarray]:
    """Return the elements of matrices in 32-bit registers as float32: one, or the lower and the upper half.

    name: "tf32", "bf16" or "f16".
    """
    if name == "tf32":
        return [from_tf32(registers)]
    return [decode_16(half, name) for half in halves(registers)]


def _e4m3_values() -> np.ndarray:
    values = np.zeros(256)
    for bits in range(256):
        sign, exponent, mantissa = -1.0 if bits >> 7 else 1.0, (bits >> 3) & 15, bits & 7
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[bits] = sign * (np.nan if bits & 127 == 127 else magnitude)
    return values


E4M3 = _e4m3_values()
_POSITIVE = E4M3[:127]


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest e4m3, ties to even, with saturation, as bits."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), _POSITIVE[-1])
    above = np.clip(np.searchsorted(_POSITIVE, magnitude), 1, len(_POSITIVE) - 1)
    below = above - 1
    to_above, to_below = _POSITIVE[above] - magnitude, magnitude - _POSITIVE[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    bits = np.where(up, above, below).astype(np.uint8)
    bits = np.where(np.isnan(values), np.uint8(127), bits)
    return bits | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def immediate(text: str, dtype: np.dtype) -> np.generic:
    """Return the value of a literal: 1, -1, 0x1F, 0x1FU, 0f3F800000, 0d3FF0000000000000, true."""
    if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
        bits = np.array([int(match[1], 16)], np.uint32 if len(match[1]) == 8 else np.uint64)
        return bits.view(dtype)[0]
    value = {"true": 1, "false": 0}.get(text)
    value = int(text.removesuffix("U"), 0) if value is None else value
    if dtype.kind == "b":
        return np.bool_(value != 0)
    bits = value & (2 ** (8 * dtype.itemsize) - 1)
    return np.array([bits], f"u{dtype.itemsize}").view(dtype)[0]
