"""The emulator: programs, faults that it reports, number formats and products."""

import math
import re

import numpy as np
import pytest
import torch

from tests.kernels.ptx import number_formats
from tests.kernels.ptx.arithmetic import function_of
from tests.kernels.ptx.fault import PtxFault
from tests.kernels.ptx.global_memory import GlobalMemory
from tests.kernels.ptx.matrices import left_places, operand_addresses, right_places
from tests.kernels.ptx.number_formats import DTYPES, immediate, to_bf16
from tests.kernels.ptx.program import Instruction, parse
from tests.kernels.ptx.thread_block import ThreadBlock

# --- the emulator on small programs: what they compute, and which of their faults it reports --------------------------

THREADS, SHARED_BYTES = 64, 1024
TEXT = """
.visible .entry small(.param .u64 .ptr .global .align 1 small_param_0)
.reqntid {threads}
{{
	.reg .pred 	%p<8>;
	.reg .b32 	%r<32>;
	.reg .b64 	%rd<8>;
	ld.param.b64 	%rd1, [small_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	mov.b32 	%r2, global_smem;
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	xor.b32 	%r5, %r3, 128;
	add.s32 	%r6, %r2, %r5;
{body}
	ret;
}}
"""
# Registers: %rd3 the thread's place in global memory, %r4 in shared memory, %r6 the place of a thread of another warp.
EXCHANGE = """
	st.shared.b32 [ %r4 + 0 ], %r1;
	bar.sync 0;
	ld.shared.b32 %r7, [%r6];
	st.global.b32 [ %rd3 + 0 ], %r7;
"""
COPY = """
	cp.async.ca.shared.global [ %r4 + 0 ], [ %rd3 + 0 ], 0x4, 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	bar.sync 0;
	ld.shared.b32 %r7, [%r6];
	bar.sync 0;
	st.global.b32 [ %rd3 + 0 ], %r7;
"""
BRANCHES = """
	mov.b32 %r7, 1;
	setp.lt.s32 %p1, %r1, 5;
	@%p1 bra $L_small;
	setp.lt.s32 %p2, %r1, 40;
	add.s32 %r7, %r7, 10;
	@%p2 bra $L_end;
	add.s32 %r7, %r7, 100;
	bra.uni $L_end;
$L_small:
	add.s32 %r7, %r7, 1000;
$L_end:
	st.global.b32 [ %rd3 + 0 ], %r7;
"""


# Threads 2 to 63 add their number to place 0 or 1, and put what they found there into their own place.
ADDITIONS = """
	setp.gt.u32 %p1, %r1, 1;
	and.b32 %r7, %r1, 1;
	mul.wide.u32 %rd4, %r7, 4;
	add.s64 %rd5, %rd1, %rd4;
	@%p1 atom.global.gpu.relaxed.add.u32 %r8, [ %rd5 + 0 ], %r1;
	@%p1 st.global.b32 [ %rd3 + 0 ], %r8;
"""


def run(body: str) -> torch.Tensor:
    """Execute a program on a tensor with the numbers of the threads, and return the tensor."""
    values = torch.arange(THREADS, dtype=torch.int32)
    program = parse(TEXT.format(threads=THREADS, body=body))
    block = ThreadBlock(program, {"small_param_0": values.data_ptr()}, SHARED_BYTES, GlobalMemory([values]))
    with np.errstate(all="ignore"):
        block.run((0, 0, 0), (1, 1, 1))
    return values


def without(body: str, *parts: str) -> str:
    for part in parts:
        assert part in body
        body = re.sub(rf"^.*{re.escape(part)}.*$", "", body, flags=re.MULTILINE)
    return body


@pytest.mark.parametrize("body", [EXCHANGE, COPY])
def test_warps_exchange_values(body: str) -> None:
    assert torch.equal(run(body), torch.arange(THREADS, dtype=torch.int32) ^ 32)


def test_threads_take_different_branches_and_meet() -> None:
    assert run(BRANCHES).tolist() == [1001 if t < 5 else 11 if t < 40 else 111 for t in range(THREADS)]


def test_atomic_additions_of_threads_meet_in_one_place() -> None:
    expected = list(range(THREADS))
    for thread in range(2, THREADS):
        expected[thread], expected[thread % 2] = expected[thread % 2], expected[thread % 2] + thread
    assert run(ADDITIONS).tolist() == expected


@pytest.mark.parametrize("name", ["atom.global.gpu.relaxed.max.u32", "atom.global.gpu.acq_rel.add.u32"])
def test_other_atomic_operations_are_refused(name: str) -> None:
    with pytest.raises(AssertionError, match=f"does not know {name}"):
        run(f"{name} %r8, [ %rd3 + 0 ], %r1;")


def test_a_block_in_braces_has_registers_of_its_own() -> None:
    body = "{ .reg .b32 tmp; add.s32 tmp, %r1, 1; mov.b32 %r7, tmp; }\n"
    body += "{\n.reg .b32 tmp;\nadd.s32 tmp, %r7, 1;\nmov.b32 %r8, tmp;\n}\nst.global.b32 [ %rd3 + 0 ], %r8;"
    assert torch.equal(run(body), torch.arange(THREADS, dtype=torch.int32) + 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without(EXCHANGE, "bar.sync"), "reads what another warp has written since the last barrier"),
        (EXCHANGE + "st.shared.b32 [ %r4 + 0 ], %r1;", "writes what another warp has read since the last barrier"),
        (EXCHANGE.replace("%r1;", "%r1;\nst.shared.b32 [ %r6 + 0 ], %r1;"), "another warp has written"),
        (without(COPY, "wait_group"), "reads what a copy in flight has not delivered"),
        (without(COPY, "commit_group"), "reads what a copy in flight has not delivered"),
        (COPY.replace("cp.async.wait_group", "st.shared.b32 [%r4], %r1;\ncp.async.wait_group"), "a copy is in flight"),
        (without(COPY, "wait_group", "ld.shared"), "the program ends while a copy is in flight"),
        (BRANCHES.replace("$L_small:", "$L_small:\nbar.sync 0;"), "some threads of the block are at another instr"),
        ("ld.global.b32 %r7, [ %rd3 + 4 ];", "a global address is outside of all tensors"),
        ("ld.global.b32 %r7, [ %rd3 + 2 ];", "a global address is not aligned"),
        ("ld.shared.b32 %r7, [%r4+1000];", "a shared address is outside of the block's memory"),
        ("ld.shared.b32 %r7, [%r4+2];", "a shared address is not aligned"),
    ],
)
def test_faults_are_reported(body: str, message: str) -> None:
    with pytest.raises(PtxFault, match=message):
        run(body)


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not know tex"):
        run("tex.level %r1, %r2, %r3;")


# --- the instructions that compute in each thread alone, at the edges of their definitions ----------------------------

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


# --- the conversions of the emulator against torch's ------------------------------------------------------------------

VALUES = torch.cat([torch.randn(4096) * 10.0**e for e in range(-8, 4)] + [torch.tensor([0.0, -0.0, 448.0, -500.0])])


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    expected = VALUES.bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(number_formats.to_bf16(VALUES.numpy()), expected)
    assert np.array_equal(number_formats.from_bf16(expected), VALUES.bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1.0 + 2.0**-11, 1.0 + 2.0**-10),  # a tie
        (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),  # a tie above an odd value
        (-1.0 - 2.0**-11, -1.0 - 2.0**-10),
        (1.0 + 2.0**-11 - 2.0**-23, 1.0),
        (2.0 - 2.0**-12, 2.0),
        (3 * 2.0**-137, 2.0**-135),  # subnormal
        (-np.inf, -np.inf),
        (np.nan, np.nan),
    ],
)
def test_tf32_is_rounded_to_the_nearest_and_ties_away_from_zero(value: float, expected: float) -> None:
    bits = number_formats.to_tf32(np.float32([value]))
    assert np.array_equal(bits.view(np.float32), np.float32([expected]), equal_nan=True) or np.isnan(value)
    assert np.array_equal(number_formats.from_tf32(bits), np.float32([expected]), equal_nan=True)


def test_a_product_ignores_the_bits_below_tf32() -> None:
    bits = np.float32([1.0 + 2.0**-10 + 2.0**-11, -1.0 - 2.0**-23]).view(np.uint32)
    assert number_formats.elements(bits, "tf32")[0].tolist() == [1.0 + 2.0**-10, -1.0]


def test_a_register_has_two_elements_of_16_bits() -> None:
    low, high = number_formats.elements(np.array([0x40003F80], np.uint32), "bf16")
    assert (low.tolist(), high.tolist()) == ([1.0], [2.0])


def test_e4m3_is_rounded_as_torch_rounds_it() -> None:
    expected = VALUES.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(number_formats.to_e4m3(VALUES.numpy()), expected.view(torch.uint8).numpy())
    every = torch.arange(256, dtype=torch.uint8)
    of_torch = every.view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(number_formats.E4M3, of_torch, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", "s32", 5),
        ("-1", "b32", 2**32 - 1),
        ("-1", "s64", -1),
        ("0x10", "u16", 16),
        ("0x10U", "b32", 16),
        ("0f3F800000", "f32", 1.0),
        ("0dC000000000000000", "f64", -2.0),
        ("-1", "pred", True),
    ],
)
def test_literals(text: str, kind: str, value: float) -> None:
    assert immediate(text, DTYPES[kind]) == value


# --- the places of matrix elements: every element has one, and those of 4 bytes follow from those of 2 ----------------

# A descriptor of rows that are 128 bytes apart, at address 1024, with a swizzle of 128 bytes.
WIDE = 1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 1024 >> 4


@pytest.mark.parametrize("size", [2, 4])
def test_the_registers_of_a_warp_hold_every_element_once(size: int) -> None:
    depth = 32 // size
    for places, shape in ((left_places(size), (16, depth)), (right_places(size), (depth, 8))):
        found = np.zeros(shape, int)
        for place in places:
            np.add.at(found, place, 1)
        assert (found == 1).all()


def test_elements_of_4_bytes_are_a_quarter_of_a_warp_apart() -> None:
    lane = 6  # of the second group of four
    assert [(row[lane], column[lane]) for row, column in left_places(4)] == [(1, 2), (9, 2), (1, 6), (9, 6)]
    assert [(row[lane], column[lane]) for row, column in right_places(4)] == [(2, 1), (6, 1)]


def test_the_second_warp_has_the_next_16_rows() -> None:
    for (row, column), (first_row, first_column) in zip(left_places(4, 4), left_places(4), strict=True):
        assert np.array_equal(row[32:64], first_row + 16)
        assert np.array_equal(column[32:64], first_column)


@pytest.mark.parametrize("descriptor", [WIDE, WIDE + (32 >> 4)])
def test_an_element_of_4_bytes_is_where_two_of_2_bytes_are(descriptor: int) -> None:
    at = operand_addresses(descriptor, 64, False, 4)
    assert at.shape == (64, 8)
    assert np.array_equal(at, operand_addresses(descriptor, 64, False)[:, ::2])
    assert len(np.unique(at)) == at.size


def test_rows_are_swizzled_by_16_bytes() -> None:
    at = operand_addresses(WIDE, 16, False, 4)
    assert at[0].tolist() == [1024 + 4 * i for i in range(8)]
    assert at[1].tolist() == [1024 + 128 + (4 * i ^ 16) for i in range(8)]
    assert at[8, 0] == 2048
