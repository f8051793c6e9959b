"""The arithmetic of the kernel benchmark, and that each of its cases runs; the timing itself needs a card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.ops.benchmarks.gpu import kernels
from quire.ops.benchmarks.gpu.kernels import (
    AddRmsNorm,
    AttentionCase,
    Card,
    GpuKernelResult,
    Heads,
    KernelWork,
    Logits,
    Moves,
    RopeAndCache,
    SiluMul,
)
from tests.support.kernels.fixtures import guards, one_torch_thread, seed  # noqa: F401 (used by all tests)
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops

CARD = Card("a card", copy_bytes_per_s=4e12, flops_per_s=800e12, bus_bytes_per_s=50e9)


def test_decoding_reads_every_key_and_value_once():
    case = AttentionCase("", (1024,) * 256, 1)
    cache, rows = 256 * 1024 * 8 * 128 * 2 * 2, 2 * 256 * 32 * 128 * 2
    assert case.work(2) == KernelWork(cache + rows, 4 * 256 * 1024 * 32 * 128)
    assert CARD.floor_s(case, 2) == pytest.approx((cache + rows) / 4e12)  # bound by memory
    skewed = AttentionCase("", (32768, *(1024,) * 63), 1)
    assert skewed.work(2).bytes == (32768 + 63 * 1024) * 8 * 128 * 2 * 2 + 2 * 64 * 32 * 128 * 2


def test_prefill_counts_the_pairs_below_the_diagonal():
    whole = AttentionCase("", (8192,))
    assert whole.pairs == 8192 * 8193 // 2
    assert whole.work(2).flops == 4 * whole.pairs * 32 * 128
    assert CARD.floor_s(whole, 2) == pytest.approx(whole.work(2).flops / 800e12)  # bound by products
    chunk = AttentionCase("", (5, 3), 2)
    assert chunk.pairs == (4 + 5) + (2 + 3)


def test_bytes_of_the_smaller_kernels():
    heads = Heads(4, 2, 16, 8)
    assert RopeAndCache("", 10, heads).work(2).bytes == 2 * 10 * (4 + 4) * 16 * 2 + 10 * (16 * 4 + 4 + 8)
    assert AddRmsNorm("", 10, 64).work(2).bytes == (4 * 10 + 1) * 64 * 2
    assert SiluMul("", 10, 64).work(2).bytes == 3 * 10 * 64 * 2
    moved = 5 * 3 * 8 * 2 * 2 * 16 * 2
    assert Moves("", "", 5, 3, heads).work(2).bytes == 2 * moved
    assert Moves("", "to host", 5, 3, heads).work(2).bytes == moved
    assert CARD.floor_s(Moves("", "to host", 5, 3, heads), 2) == pytest.approx(moved / 50e9)
    assert Logits("", "argmax", 3, 100).work(2).bytes == 3 * 100 * 4


def test_a_result_is_the_share_of_its_floor():
    case = SiluMul("silu", 4096, 16384)
    result = GpuKernelResult.of(case, CARD, 2, 2 * case.work(2).bytes / 4e12)
    assert (result.share, result.gb_per_s, result.tflop_per_s) == (pytest.approx(0.5), pytest.approx(2000), 0)


def test_names_are_distinct_and_fit_the_table():
    names = [case.name for case in kernels.CASES]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 40


HEADS = Heads(4, 2, 32, 16)
SMALL = {
    AttentionCase: {"heads": HEADS},
    RopeAndCache: {"tokens": 3, "heads": HEADS},
    AddRmsNorm: {"tokens": 3, "hidden": 40},
    SiluMul: {"tokens": 3, "inner": 40},
    Moves: {"blocks": 2, "layers": 2, "heads": HEADS},
    Logits: {"rows": 2, "vocabulary": 90},
}


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.soak
def test_every_case_runs(monkeypatch):
    ops = make_triton_ops(torch.float16, monkeypatch)
    for case in kernels.CASES:
        small = SMALL[type(case)]
        if isinstance(case, AttentionCase):
            queries = None if case.queries is None else min(case.queries, 7)
            small = small | {"lengths": tuple(n // 64 for n in case.lengths[:3]), "queries": queries}
        replace(case, **small).make(ops)()


@pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")
def test_a_card_is_measured():
    cases = [case for case in kernels.CASES if isinstance(case, (SiluMul, AddRmsNorm, Moves))]
    saved = []
    found = kernels.run(torch.bfloat16, 3, saved.append, cases)
    assert found["status"] == "passed"
    assert [row["name"] for row in found["kernels"]] == [case.name for case in cases]
    assert all(row["share"] > 0 for row in found["kernels"])
    assert len(saved) == len(cases)
