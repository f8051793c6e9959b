"""The instructions that compute in each thread alone, at the edges of their definitions."""

import math

import numpy as np
import pytest

from tests.kernels.ptx.arithmetic import function_of
from tests.kernels.ptx.number_formats import DTYPES, to_bf16
from tests.kernels.ptx.program import Instruction

NAN, INF = math.nan, math.inf


def computed(opcode: str, *operands: float) -> float:
    """Return the result of an instruction in one thread."""
    instruction = Instruction(opcode, ("%d", *map(str, operands)), None, False, opcode)
    function = function_of(instruction)
    assert function
    values = [np.array([operand], DTYPES[kind]) for operand, kind in zip(operands, function.sources, strict=True)]
    with np.errstate(all="ignore"):
        (result,) = function.compute(*values)
    return result.item()


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("div.s64", (-7, 2), -3),
        ("div.s64", (7, -2), -3),
        ("div.u32", (2**32 - 1, 2), 2**31 - 1),
        ("rem.s32", (-7, 2), -1),
        ("mul.hi.s64", (-(2**62), 8), -2),
        ("mul.hi.u32", (2**31, 6), 3),
        ("mul.wide.s32", (-(2**31), 2), -(2**32)),
        ("mul.wide.u32", (2**31, 4), 2**33),
        ("mad.wide.s32", (-3, 5, 1), -14),
        ("mul.lo.s32", (2**30, 4), 0),
        ("shl.b32", (1, 32), 0),
        ("shl.b32", (3, 31), 2**31),
        ("shr.u32", (2**31, 31), 1),
        ("shr.s32", (-8, 40), -1),
        ("bfe.u32", (0x12345678, 4, 8), 0x67),
        ("bfe.s32", (0x80, 4, 4), -8),
        ("bfe.u32", (7, 0, 0), 0),
        ("prmt.b32", (0x33221100, 0x77665544, 0x5410), 0x55441100),
        ("prmt.b32", (0x33221180, 0x77665544, 0x0879), 0x80FF7700),
        ("min.f32", (NAN, 3.0), 3.0),
        ("max.f32", (-INF, NAN), -INF),
        ("min.xorsign.abs.f32", (-3.0, 2.0), -2.0),
        ("fma.rn.f32", (1.0 + 2.0**-12, 1.0 + 2.0**-12, -1.0), 2.0**-11 + 2.0**-24),
        ("ex2.approx.ftz.f32", (-130.0,), 0.0),
        ("ex2.approx.f32", (-INF,), 0.0),
        ("rcp.approx.ftz.f64", (4.0,), 0.25),
        ("setp.ne.f32", (NAN, 1.0), False),
        ("setp.neu.f32", (NAN, 1.0), True),
        ("setp.gtu.f32", (NAN, 1.0), True),
        ("setp.leu.f64", (2.0, 1.0), False),
        ("setp.num.f32", (NAN, 1.0), False),
        ("setp.lt.u32", (2**32 - 1, 1), False),
        ("selp.f32", (1.0, 2.0, False), 2.0),
        ("cvt.s64.s32", (-5,), -5),
        ("cvt.rzi.s32.f32", (-2.7,), -2),
        ("cvt.rn.f32.s32", (-7,), -7.0),
        ("cvt.rn.bf16.f32", (1.0 + 2.0**-8,), 0x3F80),
        ("cvt.rna.tf32.f32", (1.0 + 2.0**-11,), 0x3F802000),
        ("cvt.rn.bf16x2.f32", (2.0, 1.0), 0x40003F80),
        ("cvt.rn.f16x2.e4m3x2", (0xB838,), 0xBC003C00),
        ("cvt.rn.satfinite.e4m3x2.f32", (1e9, 1.0), 0x7E38),
    ],
)  # fmt: skip
def test_results(opcode: str, operands: tuple[float, ...], expected: float) -> None:
    assert computed(opcode, *operands) == expected


def test_both_halves_of_a_pair_are_computed() -> None:
    low, high = (int(to_bf16(np.float32([value]))[0]) for value in (1.5, -2.0))
    product = computed("mul.bf16x2", low | high << 16, low | low << 16)
    assert product == int(to_bf16(np.float32([2.25]))[0]) | int(to_bf16(np.float32([-3.0]))[0]) << 16
