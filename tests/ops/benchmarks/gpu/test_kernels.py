"""The arithmetic of the kernel benchmark, and that each of its cases runs; the timing itself needs a card."""

from __future__ import annotations

import pytest
import torch

from quire.ops.benchmarks.gpu import kernels
from quire.ops.benchmarks.gpu.kernels import AddRmsNorm, AttentionCase, Card, KernelWork, Moves, SiluMul
from tests.support.kernels.fixtures import guards, one_torch_thread, seed  # noqa: F401 (used by all tests)
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops
from tests.support.rehearsal import kernel_cases

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


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.soak
def test_every_case_runs(monkeypatch):
    ops = make_triton_ops(torch.float16, monkeypatch)
    for case in kernel_cases():
        case.make(ops)()


@pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")
def test_a_card_is_measured():
    cases = [case for case in kernels.CASES if isinstance(case, (SiluMul, AddRmsNorm, Moves))]
    saved = []
    found = kernels.run(torch.bfloat16, 3, saved.append, cases)
    assert found["status"] == "passed"
    assert [row["name"] for row in found["kernels"]] == [case.name for case in cases]
    assert all(row["share"] > 0 for row in found["kernels"])
    assert len(saved) == len(cases)
