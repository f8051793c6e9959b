"""The faults of small programs that the emulator reports, of which no kernel has one that can be left out.

Left out waits and barriers of the kernels are in test_seeded_faults.py. What the instructions compute is tested by the
kernels, whose results are compared with float64.
"""

import re

import numpy as np
import pytest
import torch

from tests.kernels.ptx.global_memory import GlobalMemory
from tests.kernels.ptx.program import PtxFault, parse
from tests.kernels.ptx.thread_block import ThreadBlock

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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (EXCHANGE + "st.shared.b32 [ %r4 + 0 ], %r1;", "writes what another warp has read since the last barrier"),
        (EXCHANGE.replace("%r1;", "%r1;\nst.shared.b32 [ %r6 + 0 ], %r1;"), "another warp has written"),
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
