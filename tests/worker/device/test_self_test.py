"""A worker tests its kernels at start: it replaces wrong ones, serves right text then, or does not start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.kernels.uses import AttentionUse, ExpertsUse, LinearUse
from quire.ops.benchmarks.stack.random_model import random_decoder
from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.device.backend import arithmetic_labels, kernels_name
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.device.out_of_step import OutOfStep
from quire.worker.device.self_test import check_kernels, level_of, warn_of_assembler
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.settings import WorkerSettings
from tests.kernels.self_test.test_registry import next_token
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops
from tests.support.selection import one_in
from tests.support.transformers_checkpoints import make_kind

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
QUICK = WorkerSettings(self_test="quick", block_size=8)


def small(ops: kernels.Ops) -> Decoder:
    """A model with the same weights for all operations."""
    torch.manual_seed(7)
    return random_decoder("small", ops, torch.float32, 64)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    ops.check_ids = False
    torch.set_default_device(None)
    return ops


@pytest.mark.parametrize(
    ("setting", "device", "level"),
    [
        ("auto", CUDA, "quick"),
        ("auto", CPU, "off"),
        ("quick", CPU, "quick"),
        ("full", CUDA, "full"),
        ("off", CUDA, "off"),
    ],
)
def test_the_level_follows_setting_and_device(setting: str, device: torch.device, level: str) -> None:
    assert level_of(WorkerSettings(self_test=setting), device) == level


def test_right_kernels_stay_and_the_model_keeps_the_digest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = small(kernels.select_ops("cpu", torch.float32))
    assert check_kernels(QUICK, model, CPU) == QUICK
    report = model.self_test_report
    assert (report.faults, len(report.digest)) == ([], 8)
    assert report.num_cases > 15
    assert caplog.messages[-1].startswith(f"self-test (quick): {report.num_cases} cases of the kernels in ")
    assert caplog.messages[-1].endswith(", all right")


def test_nothing_is_tested_with_off_or_where_torch_computes_anyway() -> None:
    for settings, ops in (
        (WorkerSettings(), kernels.select_ops("cpu", torch.float32)),
        (WorkerSettings(self_test="off"), kernels.select_ops("cpu", torch.float32)),
        (QUICK, kernels.ReferenceOps()),
    ):
        model = small(ops)
        assert check_kernels(settings, model, CPU) is settings
        assert model.self_test_report.num_cases == 0


def test_a_wrong_kernel_without_replacement_ends_the_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    model, right = small(ops), ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda *given: right(*given) * 1.02, raising=False)
    expected = r"^self-test: norm \(64 features, float32\) is wrong here: it deviates by 0.02.*--kernels reference"
    with pytest.raises(StartError, match=expected) as refused:
        check_kernels(QUICK, model, CPU)
    assert "\n" not in str(refused.value)


def test_a_wrong_kernel_on_a_rank_ends_the_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(kernels.select_ops("cpu", torch.float32))

    def fails(*_: object) -> None:
        raise OutOfStep("a step failed on one rank") from kernels.WrongKernel("all-reduce (2 ranks) is wrong here")

    monkeypatch.setattr(model, "self_test", fails)
    with pytest.raises(StartError, match=r"^self-test: all-reduce \(2 ranks\) is wrong here\. Take"):
        check_kernels(QUICK, model, CPU)


def test_steps_are_launched_without_graphs_if_a_replacement_cannot_be_captured(
    triton: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(triton)

    def replaces(*_: object) -> kernels.SelfTestReport:
        triton.replace_kernel("decode")
        return kernels.SelfTestReport(1, [kernels.KernelFault("decode", "torch", "")])

    monkeypatch.setattr(model, "self_test", replaces)
    assert check_kernels(QUICK, model, CPU) == replace(QUICK, cuda_graphs=False)
    assert "without CUDA graphs" in caplog.messages[-1]
    assert kernels_name(triton) == "triton-without-decode"
    assert arithmetic_labels(model)["kernels"] == "triton-without-decode"


def serve(model: Decoder, looks_ahead: bool = False) -> list[list[list[int]]]:
    """Return the texts of a prompt that is continued in chunks, of one that begins in the middle, and of a draw."""
    limits = EngineLimits(24, 8, 4, 12, 64)
    engine = Engine(model, limits, (), None, **({"runner": partial(DeviceRunner)} if looks_ahead else {}))
    prompts = [tuple(range(3, 25)), (9, 8, 7)]
    params = [SamplingParams(4, temperature=0.0, ignore_eos=True), SamplingParams(4, seed=5, ignore_eos=True)]
    return generate(engine, prompts, params)


def ruined(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return real(*arguments, **options).mul_(-40)

    return wrong


def ruined_out(real: Callable[..., None], place: int) -> Callable[..., None]:
    """Return a kernel of attention that ruins its output, the argument at this place."""

    def wrong(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        arguments[place].mul_(-40)

    return wrong


def ruin(ops: Any, kernel: str, patch: pytest.MonkeyPatch) -> None:
    """Make a kernel of Triton so wrong that texts change."""
    from quire.kernels.gpu import attention

    if kernel == "decode":
        patch.setattr(attention, "decode", ruined_out(attention.decode, 5))
    elif kernel == "prefill":  # of cached and of new prompts
        patch.setattr(attention, "prefill", ruined_out(attention.prefill, 8))
    else:
        wrong = next_token if kernel == "sample" else ruined
        ops.kernels = replace(ops.kernels, **{kernel: wrong(getattr(ops.kernels, kernel))})


KERNELS = ("rms_norm", "sample", "prefill", "embed", "rope_and_cache", "silu_mul", "decode")


@pytest.mark.parametrize(
    "kernel",
    # All take a minute in Triton's interpreter, so CI replaces one.
    [pytest.param(one, marks=pytest.mark.slow if one == "decode" else pytest.mark.soak) for one in KERNELS],
)
def test_the_text_is_right_after_a_wrong_kernel_was_replaced(
    kernel: str, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = serve(small(kernels.ReferenceOps()))
    ruin(triton, kernel, monkeypatch)
    model = small(triton)
    assert serve(model) != expected, "the fault does not matter here"
    check_kernels(QUICK, model, CPU)
    assert {fault.kernel for fault in model.self_test_report.faults} == triton.replaced == {kernel}
    assert serve(model) == expected
    if kernel in ("rms_norm", "rope_and_cache"):
        assert serve(model, looks_ahead=True) == expected


def test_a_checkpoint_says_which_kernels_it_uses(tmp_path: Path) -> None:
    ops = kernels.ReferenceOps()
    model = Decoder.load(make_checkpoint(tmp_path / "a", "gpt-oss"), ops, torch.float32, "cpu")
    uses, config = model.kernel_uses(16), model.config
    assert (uses.block_size, uses.max_model_len, uses.vocab_size) == (16, model.max_model_len, config.vocab_size)
    assert {one.window for one in uses.attention} == set(config.sliding_windows)
    assert all(one.has_sinks for one in uses.attention)
    assert uses.experts == (
        ExpertsUse(config.hidden_size, config.experts.intermediate_size, config.experts.routing, has_biases=True),
    )
    assert not uses.has_adapters
    model = Decoder.load(make_checkpoint(tmp_path / "b", "qwen3"), ops, torch.float32, "cpu")
    uses, config = model.kernel_uses(16), model.config
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    assert uses.attention == (AttentionUse(*heads, config.attention_scale, has_norms=True),)
    assert LinearUse(config.hidden_size, 2 * config.intermediate_size) in uses.linears
    assert uses.experts == ()
    assert uses.has_adapters


@pytest.mark.slow
@pytest.mark.parametrize("family", one_in(4, ["gpt-oss", "mixtral", "gemma2", "qwen2"]))
def test_the_kernels_of_real_families_pass(family: str, tmp_path: Path) -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    model = Decoder.load(make_checkpoint(tmp_path, family), ops, torch.float32, "cpu")
    check_kernels(replace(QUICK, self_test="full"), model, CPU)
    assert model.self_test_report.faults == []


@pytest.mark.parametrize("is_old", [True, False])
def test_an_old_assembler_is_named_once_on_a_gpu(
    is_old: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "outdated_assembler", lambda found: f"ptxas of {found}" if is_old else None)
    warn_of_assembler(CUDA, WorkerSettings())
    warn_of_assembler(CPU, WorkerSettings())
    warn_of_assembler(CUDA, WorkerSettings(kernels="reference"))
    assert caplog.messages == (["ptxas of (9, 0)"] if is_old else [])


def test_the_kernels_of_a_model_of_transformers_pass(tmp_path: Path) -> None:
    config = read_transformers_config(make_kind(tmp_path, "gpt2"))
    model = TransformersModel.load(config, kernels.select_ops("cpu", torch.float32), "cpu")
    uses = model.kernel_uses(8)
    assert (uses.is_stack, uses.head, uses.embedding_dtype) == (False, None, None)
    assert [(one.heads, one.head_dim) for one in uses.attention] == [(4, 16)]
    assert any(one.has_bias for one in uses.linears)
    check_kernels(QUICK, model, CPU)
    assert model.self_test_report.faults == []
    assert model.self_test_report.num_cases > 10
