"""The emulator notices each kind of wait, fence and barrier that is left out of a kernel.

It notices if it raises, or if the result is wrong.
"""

import re
from collections.abc import Callable

import pytest
import torch

from quire import kernels
from quire.kernels.gpu import moe, tile_sizes
from quire.kernels.grouped_weight import FP8
from quire.kernels.moe import Routing
from tests.kernels.gpu import test_attention_parts, test_few_rows, test_logits
from tests.kernels.gpu.test_attention import share_keys
from tests.kernels.ptx.emulator import Emulator
from tests.kernels.ptx.program import PtxFault
from tests.kernels.ptx.test_attention import LONG, Case, check, make
from tests.kernels.ptx.test_kernels import test_experts_give_the_sum_of_the_reference as check_experts
from tests.kernels.ptx.test_kernels import test_experts_of_codes_give_the_sum_of_the_reference as check_coded_experts
from tests.kernels.ptx.test_kernels import test_input_features_of_several_tiles as check_adapters
from tests.support.kernels import oracle
from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.oracle import assert_close, slack

BARRIER = "bar.sync"
COPIES = ["cp.async.commit_group", "cp.async.wait_group"]
PRODUCTS = ["fence.proxy.async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"]
DEPENDENCY = ["griddepcontrol.wait"]
SYNCHRONISATION = re.compile(
    rf"^\s*(?:@!?%p\d+\s+)?({'|'.join(map(re.escape, [BARRIER, *COPIES, *PRODUCTS, *DEPENDENCY]))})\b.*$", re.M
)

Run = Callable[[Emulator, pytest.MonkeyPatch], None]


def decode(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make(Case(), monkeypatch, [LONG], [1])
    check(paged, paged.attend())


def invariant_decode(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.renames = {"decode_kernel"}
    paged = make(Case(d=64), monkeypatch, [300], [1], batch_invariant=True)
    check(paged, paged.attend())


def prefill(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make(Case(), monkeypatch, [300], [33])
    check(paged, paged.attend())


def wide_prefill(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make(Case(torch.float32, 2, 1, 64), monkeypatch, [150], [33])
    check(paged, paged.attend())


def fp8_prefill(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make(Case(kv_dtype=torch.float8_e4m3fn), monkeypatch, [300], [33])
    check(paged, paged.attend())


def shared_prefill(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make(Case(), monkeypatch, [LONG], [33])
    share_keys(paged, monkeypatch)
    check(paged, paged.attend())


def decode_plan(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    test_attention_parts.test_keys_are_cut_so_that_every_program_has_work_and_no_more(monkeypatch, [1024] * 256, 256)


def prefill_plan(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    test_attention_parts.test_every_query_of_a_prompt_is_in_one_tile(make_triton_ops(torch.float32, monkeypatch), 0)


def chunk_plan(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    make_triton_ops(torch.float32, monkeypatch)
    keys = test_attention_parts.chunk_keys([32768, 900], [64, 32], 16)  # 15 places for two tiles: 7 and 8
    assert (len(keys), keys[0]) == (16, 4736)


def norm(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    x, weight = torch.randn(2, 1440).bfloat16(), torch.randn(1440).bfloat16()
    assert_close(ops.rms_norm(x, weight, 1e-6), oracle.rms_norm(x, weight, 1e-6), slack(ops.dtype, 2000), rounds=2)


def argmax(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    test_logits.test_argmax_takes_the_lowest_of_equals(make_triton_ops(torch.float32, monkeypatch), 9000)


def sample(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    ops: kernels.Ops = make_triton_ops(torch.float32, monkeypatch)
    test_logits.test_every_row_is_drawn_by_its_own_settings(ops, 300)


def matmul(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = make_triton_ops(torch.bfloat16, monkeypatch, batch_invariant=True)
    x, weight = torch.randn(3, 448).bfloat16(), torch.randn(40, 448).bfloat16()
    assert_close(ops.linear_logits(x, ops.pack_linear(weight)), x.double() @ weight.double().T, 20)


def experts(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    check_experts(emulator, ops, monkeypatch, Routing(3, 2, normalised=True), (64, 64, 64, 4, 3))


def few_experts(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    monkeypatch.setattr(moe, "grouped_tiles", lambda *_: tile_sizes.MatmulTiles(16, 64, 64, 4, 4))
    check_experts(emulator, ops, monkeypatch, Routing(3, 2, normalised=True), None)


def experts_of_codes(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    check_coded_experts(emulator, ops, FP8, Routing(3, 2, normalised=True), 150)


def adapters(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_adapters(emulator, make_triton_ops(torch.bfloat16, monkeypatch))


def one_row(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    test_few_rows.test_all_layers_are_those_of_the_reference(monkeypatch, 1, "plain")


def few_rows(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    test_few_rows.test_all_layers_are_those_of_the_reference(monkeypatch, 3, "plain")


# The kernel, the run, and the kinds of synchronisation that the kernel has.
KERNELS: list[tuple[str, Run, list[str]]] = [
    ("matmul_kernel", matmul, [BARRIER, *COPIES, *PRODUCTS]),
    ("decode_kernel", decode, [BARRIER, *COPIES]),
    ("reduce_kernel", decode, [BARRIER]),
    ("decode_kernel", invariant_decode, [BARRIER, *COPIES, *PRODUCTS]),
    ("prefill_kernel", prefill, [BARRIER, *COPIES, *PRODUCTS]),
    ("prefill_kernel", shared_prefill, [BARRIER, *COPIES, *PRODUCTS]),
    ("reduce_kernel", shared_prefill, [BARRIER]),
    ("prefill_kernel", wide_prefill, [BARRIER, *COPIES, *PRODUCTS]),
    ("prefill_kernel", fp8_prefill, [BARRIER, *COPIES, *PRODUCTS]),
    ("plan_rows_kernel", decode_plan, [BARRIER]),
    ("plan_sequences_kernel", prefill_plan, [BARRIER]),
    ("plan_chunks_kernel", chunk_plan, [BARRIER]),
    ("rms_norm_kernel", norm, [BARRIER]),
    ("best_of_segment_kernel", argmax, [BARRIER]),
    ("parts_kernel", sample, [BARRIER]),
    ("count_kernel", sample, [BARRIER]),
    ("mass_kernel", sample, [BARRIER]),
    ("kept_kernel", sample, [BARRIER]),
    ("draw_kernel", sample, [BARRIER]),
    ("grouped_kernel", experts, [BARRIER, *COPIES, *PRODUCTS]),
    ("grouped_kernel", few_experts, [BARRIER, *COPIES]),
    ("shrink_kernel", adapters, [BARRIER, *COPIES]),
    ("expand_kernel", adapters, [BARRIER]),
    ("grouped_kernel", experts_of_codes, [BARRIER, *COPIES, *PRODUCTS]),
    ("one_row_kernel", one_row, [BARRIER, *DEPENDENCY]),
    ("few_rows_kernel", few_rows, [BARRIER, *COPIES, *DEPENDENCY]),
    ("rope_and_cache_kernel", few_rows, DEPENDENCY),
    ("decode_kernel", few_rows, [BARRIER, *COPIES, *DEPENDENCY]),
]


NAMES = [f"{kernel}-{run.__name__}" for kernel, run, _ in KERNELS]


@pytest.mark.parametrize(("kernel", "run", "kinds"), KERNELS, ids=NAMES)
def test_a_kind_that_is_left_out_is_noticed(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kernel: str, run: Run, kinds: list[str]
) -> None:
    run(emulator, monkeypatch)
    assert {kind for ptx in emulator.sources[kernel] for kind in SYNCHRONISATION.findall(ptx)} == set(kinds)
    for left_out in kinds:

        def without(name: str, ptx: str, left_out: str = left_out) -> str:
            return SYNCHRONISATION.sub(lambda m: "" if m[1] == left_out else m[0], ptx) if name == kernel else ptx

        emulator.edit = without
        with pytest.raises((PtxFault, AssertionError)):
            run(emulator, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kernel", "run", "least"),
    [("decode_kernel", decode, 44), ("prefill_kernel", prefill, 32)],
    ids=["decode", "prefill"],
)
def test_most_single_instructions_are_noticed(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kernel: str, run: Run, least: int
) -> None:
    """Not all are: some commits join two groups that are awaited together, and some barriers follow each other.

    least: counted with Triton 3.7.1, of 51 instructions in decode and 53 in prefill.
    """
    run(emulator, monkeypatch)
    (ptx,) = emulator.sources[kernel]
    noticed = 0
    for place in SYNCHRONISATION.finditer(ptx):
        left = ptx[: place.start()] + ptx[place.end() :]
        emulator.edit = lambda name, text, left=left: left if name == kernel else text
        try:
            run(emulator, monkeypatch)
        except (PtxFault, AssertionError):
            noticed += 1
    assert noticed >= least
