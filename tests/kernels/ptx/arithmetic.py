"""The instructions that compute registers from registers, in each thread alone.

`function_of` returns the numpy function of an instruction and the types of its operands. A product and a sum with one
rounding (fma) are computed in the next wider format, and rounded twice in rare cases.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.kernels.ptx import number_formats
from tests.kernels.ptx.number_formats import DTYPES, decode_16, encode_16, halves, joined
from tests.kernels.ptx.program import Instruction


class Function(NamedTuple):
    """The function of an instruction, and the types of its result and operands."""

    compute: Callable[..., np.ndarray]
    target: str  # type of the result
    sources: tuple[str, ...]  # types of the operands


WIDER = {"f32": np.float64, "f64": np.longdouble}


def _compare(name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a comparison. The forms with a final u are true for NaN; the others are false."""
    plain = {
        "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    }  # fmt: skip
    if name in plain:
        return plain[name]
    if name == "ne":
        return lambda x, y: (x != y) & (x == x) & (y == y)
    if name == "num":
        return lambda x, y: (x == x) & (y == y)
    if name == "nan":
        return lambda x, y: (x != x) | (y != y)
    if name == "neu":
        return np.not_equal
    ordered = plain[name.removesuffix("u")]
    return lambda x, y: ordered(x, y) | (x != x) | (y != y)


def _wide_type(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divide integers and round towards zero."""
    divisor = np.where(y == 0, 1, y).astype(x.dtype)
    quotient = np.floor_divide(x, divisor)
    is_low = (quotient * divisor != x) & ((x < 0) != (divisor < 0))
    return np.where(y == 0, -1, quotient + is_low.astype(x.dtype)).astype(x.dtype)


def _upper_half(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the upper half of the product of integers, with Python's integers, which have any length."""
    bits = 8 * x.itemsize
    return np.array([int(a) * int(b) >> bits for a, b in zip(x, y, strict=True)], x.dtype)


def _shift(x: np.ndarray, count: np.ndarray, left: bool) -> np.ndarray:
    bits = 8 * x.itemsize
    within = np.minimum(count, bits - 1).astype(x.dtype)
    shifted = np.left_shift(x, within) if left else np.right_shift(x, within)
    if x.dtype.kind == "i" and not left:
        return shifted  # the sign fills an arithmetic shift of any length
    return np.where(count < bits, shifted, 0).astype(x.dtype)


def _field(x: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Extract a field of bits, with its sign if the type has one. first + length is at most the width of the type."""
    bits = 8 * x.itemsize
    unsigned = x.view(f"u{x.itemsize}")
    first, length = first.astype(unsigned.dtype), length.astype(unsigned.dtype)
    left = (unsigned << np.minimum(bits - first - length, bits - 1).astype(unsigned.dtype)).view(x.dtype)
    return np.where(length == 0, 0, left >> np.minimum(bits - length, bits - 1).astype(x.dtype)).astype(x.dtype)


def _permuted(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Choose each byte of the result among the eight of two words. Bit 3 of a choice repeats its sign instead."""
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    found = np.zeros_like(both)
    for place in range(4):
        choice = (selector.astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (choice & np.uint64(7)))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        found |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * place)
    return found.astype(np.uint32)


def _flushed(values: np.ndarray) -> np.ndarray:
    """Replace subnormal float32 by zero, as .ftz does."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def _halves_wise(function: Callable[..., np.ndarray], name: str) -> Callable[..., np.ndarray]:
    """Return a function of pairs of 16-bit values from one of float32."""

    def compute(*pairs: np.ndarray) -> np.ndarray:
        split = [halves(one) for one in pairs]
        low, high = (
            encode_16(function(*(decode_16(one[i], name) for one in split)).astype(np.float32), name) for i in range(2)
        )
        return joined(low, high)

    return compute


def _fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) * y + z


def _xorsign_min(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sign = np.signbit(x) ^ np.signbit(y)
    return np.copysign(np.fmin(np.abs(x), np.abs(y)), np.where(sign, -1.0, 1.0)).astype(x.dtype)


def _binary(parts: tuple[str, ...], kind: str) -> Callable[..., np.ndarray]:
    name = parts[0]
    if name in ("min", "max"):
        if "xorsign" in parts:
            assert name == "min"
            return _xorsign_min
        if "NaN" in parts:
            return np.minimum if name == "min" else np.maximum
        return np.fmin if name == "min" else np.fmax
    if name == "div":
        return np.divide if kind[0] == "f" else _divide
    if name == "rem":
        return lambda x, y: (x - _divide(x, y) * y).astype(x.dtype)
    return {
        "add": np.add, "sub": np.subtract, "mul": np.multiply,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "copysign": lambda x, y: np.copysign(y, x),
    }[name]  # fmt: skip


UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": np.negative, "abs": np.abs, "not": np.invert, "sqrt": np.sqrt, "ex2": np.exp2, "lg2": np.log2,
    "rcp": np.reciprocal, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "mov": np.copy,
}  # fmt: skip


def _conversion(instruction: Instruction) -> Function:
    target, source = instruction.parts[-2:]
    if target in ("bf16x2", "f16x2") and source == "f32":  # the first operand goes to the upper half
        name = target.removesuffix("x2")
        return Function(lambda high, low: joined(encode_16(low, name), encode_16(high, name)), target, ("f32", "f32"))
    if target == "tf32":
        assert "rna" in instruction.parts, f"the emulator does not know {instruction.opcode}"
        return Function(number_formats.to_tf32, "b32", ("f32",))
    if target == "e4m3x2":

        def to_e4m3_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
            to = number_formats.to_e4m3
            return to(low).astype(np.uint16) | (to(high).astype(np.uint16) << np.uint16(8))

        return Function(to_e4m3_pair, "b16", ("f32", "f32"))
    if source == "e4m3x2":
        table = number_formats.E4M3.astype(np.float32)

        def from_e4m3_pair(pair: np.ndarray) -> np.ndarray:
            name = target.removesuffix("x2")
            low, high = table[pair & np.uint16(0xFF)], table[pair >> np.uint16(8)]
            return joined(encode_16(low, name), encode_16(high, name))

        return Function(from_e4m3_pair, "b32", ("b16",))
    decode = (lambda x: decode_16(x, source)) if source in ("bf16", "f16") else (lambda x: x)
    if target in ("bf16", "f16"):
        return Function(
            lambda x: encode_16(decode(x.view("u2") if source == "f16" else x).astype(np.float32), target),
            "b16",
            (source,),
        )
    if source == "f16":
        return Function(lambda x: x.astype(DTYPES[target]), target, (source,))
    to = DTYPES[target]
    if DTYPES[source].kind == "f" and to.kind in "iu":
        rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
        rounding = next(rounded[part] for part in instruction.parts if part in rounded)
        info = np.iinfo(to)
        return Function(
            lambda x: np.clip(np.nan_to_num(rounding(x.astype(np.float64))), info.min, info.max).astype(to),
            target,
            (source,),
        )
    return Function(lambda x: decode(x).astype(to), target, (source,))


def function_of(instruction: Instruction) -> Function | None:
    """Return what the instruction computes; None if it is not one of this module."""
    parts = instruction.parts
    name, kind = parts[0], parts[-1]
    if name == "cvt":
        return _conversion(instruction)
    if name in ("mov", "cvta"):  # addresses of parameters are generic ones
        return Function(np.copy, kind, (kind,))
    if name == "selp":
        return Function(lambda x, y, p: np.where(p, x, y), kind, (kind, kind, "pred"))
    if name == "setp":
        half = kind in ("bf16", "f16")
        compare = _compare(parts[1])
        first = (
            (lambda x, y: compare(decode_16(x.view("u2"), kind), decode_16(y.view("u2"), kind))) if half else compare
        )
        if len(instruction.operands) == 4:
            join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[parts[2]]
            return Function(lambda x, y, p: join(first(x, y), p), "pred", (kind, kind, "pred"))
        return Function(first, "pred", (kind, kind))
    if name in ("mul", "mad") and "wide" in parts:
        wide = _wide_type(kind)
        to = DTYPES[wide]
        if name == "mul":
            return Function(lambda x, y: x.astype(to) * y.astype(to), wide, (kind, kind))
        return Function(lambda x, y, z: x.astype(to) * y.astype(to) + z, wide, (kind, kind, wide))
    if name in ("mul", "mad") and "hi" in parts:
        assert name == "mul"
        return Function(_upper_half, kind, (kind, kind))
    if name == "mad":
        return Function(lambda x, y, z: x * y + z, kind, (kind, kind, kind))
    if name == "fma":
        if kind in ("bf16x2", "f16x2"):
            of = kind.removesuffix("x2")
            return Function(_halves_wise(_fused, of), kind, (kind,) * 3)
        if kind in ("bf16", "f16"):
            return Function(
                lambda *values: encode_16(
                    _fused(*(decode_16(one.view("u2"), kind) for one in values)).astype(np.float32), kind
                ),
                "b16",
                (kind,) * 3,
            )
        wide = WIDER[kind]
        return Function(lambda x, y, z: (x.astype(wide) * y + z).astype(x.dtype), kind, (kind,) * 3)
    if name in ("shl", "shr"):
        return Function(lambda x, count: _shift(x, count, name == "shl"), kind, (kind, "u32"))
    if parts == ("prmt", "b32"):
        return Function(_permuted, kind, (kind, kind, kind))
    if name == "bfe":
        return Function(_field, kind, (kind, "u32", "u32"))
    if name in UNARY:
        one = UNARY[name]
        if kind in ("bf16x2", "f16x2"):
            return Function(_halves_wise(one, kind.removesuffix("x2")), kind, (kind,))
        if "approx" in parts:
            wider = WIDER[kind]
            flush = _flushed if "ftz" in parts and kind == "f32" else lambda x: x
            dtype = DTYPES[kind]
            return Function(lambda x: flush(one(flush(x).astype(wider)).astype(dtype)), kind, (kind,))
        return Function(one, kind, (kind,))
    if name in ("add", "sub", "mul", "min", "max", "div", "rem", "and", "or", "xor", "copysign"):
        if kind in ("bf16x2", "f16x2"):
            return Function(_halves_wise(_binary(parts, "f32"), kind.removesuffix("x2")), kind, (kind, kind))
        if kind in ("bf16", "f16"):
            two = _binary(parts, "f32")
            return Function(
                lambda x, y: encode_16(two(decode_16(x.view("u2"), kind), decode_16(y.view("u2"), kind)), kind),
                "b16",
                (kind, kind),
            )
        return Function(_binary(parts, kind), kind, (kind, kind))
    return None
