"""The static checks on small programs."""

from __future__ import annotations

from tests.kernels.ptx.program import Program, parse
from tests.kernels.static.ptx_checks import divided_barriers, touched_before_wait, written_without_barrier

# --- the checks of PTX find each fault in a short program that has it, and none in one that has not -------------------

PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2}, {%r3, %r4}, %rd1, 1, 1, 1, 0;"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
WRITE, BARRIER = "st.shared.b32 [%r9], %r8;", "bar.sync 0;"
THREAD = "mov.u32 %r5, %tid.x;"


def program(*lines: str, threads: int = 256) -> Program:
    body = "\n".join((*lines, "ret;"))
    return parse(f".visible .entry kernel(\n)\n.reqntid {threads}\n{{\n{body}\n}}\n")


# --- registers of products under way ----------------------------------------------------------------------------------


def test_registers_of_a_product_are_free_after_its_wait() -> None:
    use = "add.f32 %r1, %r2, %r3;"
    assert touched_before_wait(program(PRODUCT, COMMIT, WAIT, use)) == []
    [found] = touched_before_wait(program(PRODUCT, COMMIT, use, WAIT))
    assert "%r1, %r2, %r3" in found
    assert touched_before_wait(program(PRODUCT, use, COMMIT, WAIT)), "before it is committed"


def test_a_further_product_may_add_to_the_same_accumulators_but_not_multiply_them() -> None:
    assert touched_before_wait(program(PRODUCT, PRODUCT, COMMIT, WAIT)) == []
    multiplies = PRODUCT.replace("{%r1, %r2}, {%r3, %r4}", "{%r6, %r7}, {%r1, %r2}")
    [found] = touched_before_wait(program(PRODUCT, multiplies, COMMIT, WAIT))
    assert "operand" in found


def test_a_wait_for_all_but_one_group_frees_the_older_ones() -> None:
    second = PRODUCT.replace("{%r1, %r2}, {%r3, %r4}", "{%r6, %r7}, %rd2")
    but_one = WAIT.replace("0;", "1;")
    assert touched_before_wait(program(PRODUCT, COMMIT, second, COMMIT, but_one, "mov.b32 %r8, %r1;", WAIT)) == []
    assert touched_before_wait(program(PRODUCT, COMMIT, second, COMMIT, but_one, "mov.b32 %r8, %r6;", WAIT))


def test_a_loop_that_returns_before_the_wait_is_followed() -> None:
    loop = ("$L0:", "mov.b32 %r8, %r1;", PRODUCT, COMMIT, "@%p1 bra $L0;", WAIT)
    assert touched_before_wait(program(*loop))
    assert touched_before_wait(program("$L0:", "mov.b32 %r8, %r1;", PRODUCT, COMMIT, WAIT, "@%p1 bra $L0;")) == []


def test_what_is_loaded_from_tensor_memory_waits_too() -> None:
    load, use = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r9];", "mov.b64 %rd1, {%r1, %r2};"
    assert touched_before_wait(program(load, "tcgen05.wait::ld.sync.aligned;", use)) == []
    assert touched_before_wait(program(load, use, "tcgen05.wait::ld.sync.aligned;"))


# --- shared memory ----------------------------------------------------------------------------------------------------


def test_a_barrier_is_needed_between_a_wait_and_the_next_write() -> None:
    assert written_without_barrier(program(PRODUCT, COMMIT, WAIT, BARRIER, WRITE)) == []
    [found] = written_without_barrier(program(PRODUCT, COMMIT, WAIT, WRITE, BARRIER))
    assert found.startswith("st.shared.b32")
    copy = "cp.async.cg.shared.global [%r9], [%rd1], 16;"
    assert written_without_barrier(program(PRODUCT, COMMIT, BARRIER, WAIT, copy)), "a barrier before the wait is none"


def test_a_write_in_the_next_round_of_a_loop_counts() -> None:
    loop = ("$L0:", WRITE, PRODUCT, COMMIT, WAIT, "@%p1 bra $L0;")
    assert written_without_barrier(program(*loop))
    assert written_without_barrier(program(*loop[:-1], BARRIER, loop[-1])) == []


# --- branches ---------------------------------------------------------------------------------------------------------


def around(predicate: str, *inner: str) -> Program:
    return program(THREAD, predicate, "@%p1 bra $L1;", *inner, "$L1:", BARRIER)


def test_a_barrier_behind_a_branch_of_some_threads_is_found() -> None:
    uniform = "setp.eq.u32 %p1, %r7, 3;"
    assert divided_barriers(around(uniform, BARRIER)) == []
    [found] = divided_barriers(around("setp.eq.u32 %p1, %r5, 3;", BARRIER))
    assert found.startswith("bar.sync")
    assert divided_barriers(around("setp.eq.u32 %p1, %r5, 3;", WRITE)) == [], "threads meet again behind the branch"


def test_a_guarded_barrier_is_found() -> None:
    assert divided_barriers(program(THREAD, "setp.eq.u32 %p1, %r5, 3;", f"@%p1 {BARRIER}"))


def test_a_branch_of_whole_warps_allows_what_only_a_warp_does() -> None:
    first_warp, shuffle = "setp.lt.u32 %p1, %r5, 32;", "shfl.sync.bfly.b32 %r6, %r7, 1, 31, -1;"
    assert divided_barriers(around(first_warp, shuffle)) == []
    assert divided_barriers(around(first_warp.replace("32", "16"), shuffle))
    assert divided_barriers(around(first_warp, BARRIER))
    of_warp = ("shr.u32 %r6, %r5, 5;", "setp.eq.u32 %p1, %r6, 0;")
    assert divided_barriers(program(THREAD, *of_warp, "@%p1 bra $L1;", shuffle, "$L1:")) == []


def test_a_value_written_under_such_a_branch_differs_too() -> None:
    lines = (THREAD, "setp.eq.u32 %p1, %r5, 3;", "mov.b32 %r6, 1;", "@%p1 bra $L1;", "mov.b32 %r6, 2;", "$L1:")
    assert divided_barriers(program(*lines, "setp.eq.u32 %p2, %r6, 1;", "@%p2 bra $L2;", BARRIER, "$L2:"))


def test_a_loop_whose_length_depends_on_the_thread_holds_no_barrier() -> None:
    assert divided_barriers(program(THREAD, "$L0:", BARRIER, "setp.eq.u32 %p1, %r5, 3;", "@%p1 bra $L0;"))


def test_sums_over_lanes_are_trusted_only_on_request() -> None:
    lines = (THREAD, "shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;", "add.s32 %r7, %r5, %r6;", "setp.eq.u32 %p1, %r7, 3;")
    divided = program(*lines, "@%p1 bra $L1;", BARRIER, "$L1:")
    assert divided_barriers(divided)
    assert divided_barriers(divided, trusts_sums=True) == []
    plain = program(THREAD, "add.s32 %r7, %r5, 1;", "setp.eq.u32 %p1, %r7, 3;", "@%p1 bra $L1;", BARRIER, "$L1:")
    assert divided_barriers(plain, trusts_sums=True)


def test_labels_of_inline_assembly_may_repeat() -> None:
    wait = ("{", ".reg .pred done;", "again:", "mbarrier.try_wait.b64 done, [%r9], %r8;", "@!done bra.uni again;", "}")
    twice = program(*wait, BARRIER, *wait)
    assert len(twice.labels) == 2
    assert divided_barriers(twice) == []
