"""Benchmarks of kernels: their arithmetic, one small run of each, and perplexity by format."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels.cpu import library
from quire.kernels.grouped_weight import KINDS
from quire.kernels.k_quant_weight import K_QUANTS
from quire.ops.benchmarks.kernels import attention, cpu, formats, gpu, perplexity, sampling
from quire.ops.benchmarks.kernels.gpu import (
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
from quire.ops.paths import PROJECT_ROOT
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops

# --- gpu --------------------------------------------------------------------------------------------------------------
# The arithmetic of the GPU benchmark, and that each of its cases runs; the timing itself needs a card.


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
    printed = gpu.table(CARD, [result])
    assert "copies 4000 GB/s, products 800 TFLOP/s, bus 50.0 GB/s" in printed
    assert "silu" in printed
    assert "50.0%" in printed


def test_names_are_distinct_and_fit_the_table():
    names = [case.name for case in gpu.CASES]
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
    for case in gpu.CASES:
        small = SMALL[type(case)]
        if isinstance(case, AttentionCase):
            queries = None if case.queries is None else min(case.queries, 7)
            small = small | {"lengths": tuple(n // 64 for n in case.lengths[:3]), "queries": queries}
        replace(case, **small).make(ops)()


@pytest.mark.skipif(ON_CUDA, reason="there is a CUDA device")
def test_without_a_card_there_is_one_line(capsys):
    assert cpu.main(["--ops", "triton"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        cpu.main(["--ops", "cpu", "--json", "x.json"])


@pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")
def test_a_card_is_measured(capsys, tmp_path):
    file = tmp_path / "kernels.json"
    cases = [case for case in gpu.CASES if isinstance(case, (SiluMul, AddRmsNorm, Moves))]
    assert gpu.run(torch.bfloat16, 3, file, cases) == 0
    assert "share" in capsys.readouterr().out
    assert file.read_text().count('"share"') == len(cases)


# --- cpu --------------------------------------------------------------------------------------------------------------
# The benchmark runs on a small shape and reports every operation.


def test_a_small_step_is_reported(capsys):
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    small = ["--hidden", "64", "--intermediate", "96", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    small += ["--head-dim", "32", "--vocabulary", "200", "--context", "40", "--repeat", "1", "--dtype", "float32"]
    assert cpu.main([*small, "--case", "decode:2", "--case", "prefill:5"]) == 0
    printed = capsys.readouterr().out
    for word in ("reference", "decode:2", "prefill:5", "attention", "gate_up", "head", "tokens/s"):
        assert word in printed
    for weights in ("float16", "int8", "int4"):
        assert cpu.main([*small, "--ops", "cpu", "--case", "decode:2", "--weights", weights]) == 0
        assert "tokens/s" in capsys.readouterr().out


# --- formats ----------------------------------------------------------------------------------------------------------
# The comparison of formats of weights prints a line for each number of rows.


def test_each_format_has_a_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.set_num_threads", lambda count: None)  # the threads of the other tests stay
    assert formats.main(["--width", "256", "--rows", "1", "3", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    measured = [line for line in lines if "not measured" not in line]
    for line in measured:
        assert f"{formats.BASE} " in line
        assert all(f"{kind} " in line for kind in (*KINDS, *K_QUANTS))
        assert (", int8 " in line) == line.startswith("float32")
    assert len(lines) >= 2


# --- attention --------------------------------------------------------------------------------------------------------
# The benchmark of long contexts runs on a small shape and reports every type of the cache.


SMALL_FLAGS = [
    "--context",
    "40",
    "--layers",
    "2",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "32",
    "--rounds",
    "1",
]


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))


def test_every_type_of_the_cache_is_reported(capsys):
    assert attention.main([*SMALL_FLAGS, "--queries", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["float32", "bfloat16", "int8", "fp8"]


def test_each_sequence_has_its_own_blocks(capsys):
    def megabytes(sequences: int) -> float:
        options = [*SMALL_FLAGS, "--context", "1600", "--sequences", str(sequences), "--kv-dtype", "float32"]
        assert attention.main(options) == 0
        return float(capsys.readouterr().out.splitlines()[1].split()[2])

    assert megabytes(3) == pytest.approx(3 * megabytes(1), abs=0.1)


def test_more_queries_than_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        attention.main([*SMALL_FLAGS, "--queries", "41"])
    assert "--queries 41" in capsys.readouterr().err


def test_the_floor_reads_every_byte():
    memory = torch.randint(-(2**62), 2**62, (400_000,))
    expected = 0
    for word in memory.view(-1, 8).tolist():
        for value in word:
            expected ^= value % 2**64
    assert library.load().common.read_memory(memory.data_ptr(), memory.nbytes) == expected


# --- sampling ---------------------------------------------------------------------------------------------------------
# The benchmark of sampling runs on a small vocabulary and reports every case.


def test_every_case_is_reported(capsys):
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    assert sampling.main(["--vocabulary", "500", "--rows", "2", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    for name in ("read", "argmax", "top 20 logprobs", *sampling.PARAMETERS):
        assert name in printed


# --- perplexity -------------------------------------------------------------------------------------------------------
# Quantised weights of the demo model hardly change its perplexity.


def test_each_format_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT_ROOT))
    monkeypatch.setattr(sys, "argv", ["perplexity", "--documents", "16"])
    assert perplexity.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if "not measured" not in line]
    if not lines:
        pytest.skip("no C++ kernels")
    found = {line[:40].strip(): float(line[40:].split()[0]) for line in lines}
    plain = found.pop("bfloat16 weights, float32 activations")
    assert 1 < plain < 1.5
    assert found.pop("int4") < plain * 1.02
    assert all(other < plain * 1.005 for other in found.values())


# --- random features --------------------------------------------------------------------------------------------------
# The model of random layers: its head learns, and each format of weights has a perplexity of its own.


@pytest.mark.soak
def test_each_format_has_a_perplexity_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROJECT_ROOT))
    command = "perplexity --random-features --training-documents 64 --documents 16"
    monkeypatch.setattr(sys, "argv", command.split())
    assert perplexity.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if "not measured" not in line]
    if not lines:
        pytest.skip("no C++ kernels")
    found = {line[:40].strip(): float(line[40:].split()[0]) for line in lines}
    plain = found["bfloat16 weights, float32 activations"]
    assert 20 < plain < 700  # of 1,536 words: a head without training has 1,536
    assert abs(found["int8"] / plain - 1) < 0.03
    assert abs(found["int4"] / plain - 1) < 0.2
    assert len(set(found.values())) == len(found)
