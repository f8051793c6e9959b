"""The compiled kernels that Quire serves with pass the static checks, on every GPU that Quire supports.

CI checks one launch of each kernel for compute capability 9.0; soak tests check all launches for all capabilities.
Findings that are known are listed here with their reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kernels.ptx import program
from tests.kernels.static import ptx_checks
from tests.kernels.static.occupancy import MULTIPROCESSORS
from tests.support.kernels.implementations import HAS_TRITON

if HAS_TRITON:
    import triton

    from tests.kernels.static import golden, sass
    from tests.kernels.static.compiled import CAPABILITIES, ONCE, SHORT, assembled, assemblers

if TYPE_CHECKING:
    from tests.kernels.static.compiled import StaticKernel

pytestmark = [pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"), pytest.mark.timeout(900)]

HOPPER, BLACKWELL = 90, 100
LAUNCHES = [(HOPPER, "once"), *((one, None) for one in (CAPABILITIES if HAS_TRITON else ()))]
ON_EACH_GPU = pytest.mark.parametrize(("capability", "shape"), LAUNCHES)

# Triton 3.7.1 lets LLVM copy registers of asynchronous instructions before the wait for them. PTX leaves such copies
# undefined. Both versions of ptxas that Triton brings remove the copies of accumulators (see the test of machine code).
# The copy from tensor memory depends on scoreboards, which nvdisasm does not print.
COPIED_EARLY = [
    (HOPPER, "decode_kernel", "bf16 d64 32/8 page16 window0 invariant"),
    (HOPPER, "decode_kernel", "bf16 d128 32/8 page16 window0 invariant"),
    (BLACKWELL, "prefill_kernel", "bf16 d64 32/8 page16 window0 invariant"),
    (BLACKWELL, "prefill_kernel", "bf16 d128 32/8 page16 window0 invariant"),
    (BLACKWELL, "prefill_kernel", "bf16 d128 32/8 page16 window0 fp8 invariant"),
]
COPY = re.compile(r"mov\.b(32|64)\s")
# With an fp8 cache, prefill copies the next tile before the barrier, into a buffer that the awaited product does not
# read. The emulator, which knows the addresses, finds no fault (tests/kernels/ptx/test_attention.py).
OTHER_BUFFER = ("prefill_kernel", "fp8")
# The branch that leaves a program without work depends on a sum over experts. Each warp adds up the same numbers, so
# that the sum is the same in all threads. The emulator, which allows threads to part, finds that they do not.
BRANCHES_ON_A_SUM = "grouped_kernel"
# Its warps have roles, and meet at barriers of their role alone. The emulator runs each role on its own, and finds that
# the threads of a role stay together (tests/kernels/ptx/test_hopper_prefill.py).
HAS_ROLES = "hopper_prefill_kernel"

Served = Callable[..., list["StaticKernel"]]


def unexpected(found: dict[str, list[str]]) -> str:
    """Return the findings as a message, a line each."""
    return "\n".join(f"{name}: {line}" for name, lines in found.items() for line in lines[:3])


@ON_EACH_GPU
def test_no_register_of_a_product_under_way_is_touched(served: Served, capability: int, shape: str | None) -> None:
    kernels = served(capability, shape)
    found = {one.key[:3]: lines for one in kernels if (lines := ptx_checks.touched_before_wait(one.program))}
    known = [key for key in COPIED_EARLY if key in {one.key[:3] for one in kernels}]
    for key in known:
        assert key in found, f"{key}: this Triton places the copies after the wait; take the kernel from the list"
        found[key] = [line for line in found[key] if not COPY.match(line)]
    assert not any(found.values()), unexpected({str(key): lines for key, lines in found.items()})
    assert capability != HOPPER or any("wgmma" in one.ptx for one in kernels), "there was nothing to check"


@ON_EACH_GPU
def test_a_barrier_follows_the_wait_for_a_product_of_two_warpgroups(
    served: Served, capability: int, shape: str | None
) -> None:
    found = {
        str(one): lines
        for one in served(capability, shape)
        if (lines := ptx_checks.written_without_barrier(one.program))
        and not (one.name == OTHER_BUFFER[0] and OTHER_BUFFER[1] in one.launch)
    }
    assert not found, unexpected(found)


@ON_EACH_GPU
def test_no_branch_divides_the_threads_before_a_barrier(served: Served, capability: int, shape: str | None) -> None:
    found = {
        str(one): lines
        for one in served(capability, shape)
        if one.name != HAS_ROLES
        and (lines := ptx_checks.divided_barriers(one.program, trusts_sums=one.name == BRANCHES_ON_A_SUM))
    }
    assert not found, unexpected(found)


@ON_EACH_GPU
def test_every_kernel_can_be_launched_and_is_as_in_the_table(
    served: Served, capability: int, shape: str | None
) -> None:
    kernels = served(capability, shape)
    for one in kernels:
        assert one.shared <= MULTIPROCESSORS[capability].shared_per_block, one
        assert one.per_multiprocessor, f"{one} does not fit a multiprocessor"
    of_table, table = golden.read()
    if of_table != golden.toolchain():
        pytest.skip(f"the table is of {of_table}, and here is {golden.toolchain()}")
    new = golden.rows(kernels)
    old = {key: row for key, row in table.items() if key[0] == str(capability)}
    assert {one.name for one in kernels} == {key[1] for key in old}
    if shape:  # in the table, kernels that several shapes use belong to the first shape
        old, new = ({key: one[key] for key in sorted(set(old) & set(new))} for one in (old, new))
        assert {"decode_kernel", "prefill_kernel"} <= {key[1] for key in new}
    found = golden.differences(old, new)
    assert not found, "\n".join([*found, "if that is meant: python -m tests.kernels.static.golden --write"])


def test_every_kernel_of_the_table_can_be_launched() -> None:
    """CI compiles for Hopper only: of other GPUs it has the table."""
    _, table = golden.read()
    place = golden.COLUMNS.index("per_sm") - golden.KEY
    assert not [key for key, row in table.items() if row[place] == "0"], "tiles with too much shared memory"


# --- machine code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["once", None])
@pytest.mark.parametrize("number", range(3))
def test_no_assembler_touches_a_register_of_a_product_under_way(served: Served, shape: str | None, number: int) -> None:
    """Also where PTX leaves a copy undefined (COPIED_EARLY)."""
    versions = assemblers()
    if number >= len(versions):
        pytest.skip("TEST_PTXAS names no further version of ptxas")
    name, path = list(versions.items())[number]
    checked = 0
    for one in served(HOPPER, shape):
        if "wgmma" in one.ptx:
            with assembled(one.ptx, HOPPER, path) as cubin:
                code = sass.parse(sass.disassemble(cubin))
            assert any(instruction.is_product for instruction in code.instructions), one
            found = sass.touched_before_wait(code) + sass.beyond_allocation(code, one.registers)
            assert not found, f"ptxas {name}, {one}: {found}"
            checked += 1
    assert checked, "there was nothing to check"


def test_what_triton_assembles_is_what_the_assembler_gives(served: Served) -> None:
    """The options of `assembled` are those of Triton."""
    kernels = {one.name: one for one in served(HOPPER, ONCE)}
    one = kernels["decode_kernel"]
    with assembled(one.ptx, HOPPER, triton.knobs.nvidia.ptxas.path) as cubin:
        again = sass.parse(sass.disassemble(cubin))
    assert again.instructions == one.code.instructions


# --- controls: doctored kernels ---------------------------------------------------------------------------------------


def of(served: Served, name: str) -> StaticKernel:
    return next(one for one in served(HOPPER, ONCE) if one.name == name and "wgmma" in one.ptx)


def test_a_left_out_wait_is_found_in_ptx_and_in_machine_code(served: Served, tmp_path: Path) -> None:
    one = of(served, "prefill_kernel")
    without = program.parse(re.sub(r"wgmma\.wait_group\S*\s+\d+;", "", one.ptx))
    assert ptx_checks.touched_before_wait(without)
    text = sass.disassemble(one.file.with_suffix(".cubin"))
    assert sass.touched_before_wait(sass.parse(text)) == []
    doctored = re.sub(r"WARPGROUP\.DEPBAR\S*\s+gsb0, 0x0", "NOP", text)
    assert doctored != text
    assert sass.touched_before_wait(sass.parse(doctored))


def test_a_wait_for_too_few_products_and_a_register_beyond_the_allocation_are_found(served: Served) -> None:
    one = of(served, HAS_ROLES)
    assert sass.touched_before_wait(one.code) == sass.beyond_allocation(one.code, one.registers) == []
    text = sass.disassemble(one.file.with_suffix(".cubin"))
    for pattern, instead in ((r"(DEPBAR\S*\s+gsb0,) 0x0", r"\1 0x1"), (r"(DEPBAR\S*\s+gsb0,) 0x1", r"\1 0x2")):
        doctored = re.sub(pattern, instead, text)
        assert doctored != text
        assert sass.touched_before_wait(sass.parse(doctored))
    doctored = re.sub(r"(USETMAXREG\S*\s+(?:UP\d, )?)0x(18|f0)\b", r"\g<1>0x10", text)
    assert sass.beyond_allocation(sass.parse(doctored), one.registers)


def test_a_left_out_barrier_is_found(served: Served) -> None:
    one = of(served, "prefill_kernel")
    assert one.warps == 8
    assert ptx_checks.written_without_barrier(program.parse(one.ptx.replace("bar.sync", "// bar.sync")))


def test_a_branch_on_the_thread_is_found(served: Served) -> None:
    one = of(served, "prefill_kernel")
    guard = next(line.guard for line in one.program.instructions if line.parts[0] == "bra" and line.guard)
    compare = next(line for line in one.program.instructions if line.parts[0] == "setp" and guard in line.operands)
    thread = f"setp.ne.u32 {guard}, %tid.x, 3"
    assert compare.text in one.ptx
    assert ptx_checks.divided_barriers(program.parse(one.ptx.replace(compare.text, thread, 1)))


def test_a_kernel_that_takes_more_than_in_the_table_is_found(served: Served) -> None:
    new = golden.rows(served(HOPPER, ONCE))
    key = next(key for key in new if key[1] == "decode_kernel")
    warps, registers, _, *rest = new[key]
    more = new | {key: (warps, str(int(registers) + 1), "8", *rest)}
    assert golden.differences(new, new) == []
    assert len(golden.differences(new, more)) == 2
    assert "spilled was 0, is 8" in golden.differences(new, more)[1]
    fewer = {one: row for one, row in new.items() if one != key}
    assert golden.differences(new, fewer) == [f"90 decode_kernel {SHORT} 0: gone"]
    assert golden.differences(fewer, new) == [f"90 decode_kernel {SHORT} 0: new"]


# --- what the loops of the table say ----------------------------------------------------------------------------------


def loops_of(name: str, *flags: str, capability: int = HOPPER) -> dict[str, str]:
    """Return the loops of the table of the launches with all of these words."""
    _, table = golden.read()
    return {
        " ".join(key[2:]): row[-1]
        for key, row in table.items()
        if key[:2] == (str(capability), name) and set(flags) <= set(key[2].split())
    }


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_no_value_of_an_fp8_cache_is_converted_alone(capability: int) -> None:
    """One instruction converts two values to float16 (`online_softmax.to_float16`)."""
    for name in ("decode_kernel", "prefill_kernel"):
        loops = loops_of(name, "fp8", capability=capability)
        assert loops
        assert not [where for where, text in loops.items() if " F2F," in text]


def test_no_loop_reads_spilled_registers() -> None:
    names = "decode_kernel", "prefill_kernel", HAS_ROLES, "matmul_kernel", "grouped_kernel", "grouped_matmul_kernel"
    for name in names:
        loops = loops_of(name)
        assert loops, name
        assert not [where for where, text in loops.items() if "LDL" in text], name


def test_the_toolchain_of_the_table_is_the_tested_one() -> None:
    versions, table = golden.read()
    assert versions.startswith("triton 3.7.1, "), "constraints.txt has another Triton; write the table anew"
    assert {int(key[0]) for key in table} == set(CAPABILITIES)
