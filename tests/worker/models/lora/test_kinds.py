"""Adapters of each kind that PEFT writes: one batch of all of them has the answers that PEFT computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.ops.tools.gguf_writer import write_gguf
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.models.files.loader import Weights
from quire.worker.models.files.lora.adapter import BaseFiles
from quire.worker.models.native.decoder import Decoder
from tests.support.adapters import load_adapted, load_base, write_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.parity import GREEDY, assert_greedy, make_engine, prompts
from tests.support.quantized import quantize_checkpoint
from tests.support.vision_checkpoints import make_vision

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "embedding": {"targets": ["q_proj", "embed_tokens"]},
    "head": {"targets": ["q_proj", "lm_head"]},
    "tied ends": {"targets": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tied head": {"targets": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "dora ends": {"targets": ["q_proj", "down_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "saved": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "saved norms": {"targets": ["q_proj"], "modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
    "saved embedding": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved tied": {"targets": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tokens": {"targets": ["q_proj"], "trainable_token_indices": list(range(9, 60, 3))},
    "own tokens": {"targets": ["o_proj"], "trainable_token_indices": {"embed_tokens": [9, 7], "lm_head": [11]}},
    "lora bias": {"targets": ["q_proj", "down_proj"], "lora_bias": True},
    "biases": {"targets": ["k_proj", "o_proj"], "bias": "lora_only"},
    "dora biases": {"targets": ["q_proj", "up_proj"], "bias": "all", "use_dora": True},
}


def answers(base: Path, adapters: dict[str, Path], prefer: str = "auto", bits: int = 0) -> list[list[int]]:
    """Return the greedy answers to the first prompts, the first without an adapter, the others with one each."""
    model = Decoder.load(base, kernels.select_ops("cpu", torch.float32, prefer), torch.float32, "cpu", bits=bits)
    engine = make_engine(model, max_num_seqs=20)  # which speculates and preempts
    engine.adapters.limit = len(adapters)
    for number, (name, text) in enumerate(zip(["", *adapters], prompts(), strict=False)):
        if name:
            engine.adapters.add(model.load_adapter(name, adapters[name], 64))
        engine.add(GenerationRequest(str(number), "m", text, GREEDY, adapter=name))
    found: list[list[int]] = [[] for _ in range(1 + len(adapters))]
    while engine.has_work:
        for item in engine.step():
            for delta in item.deltas:
                found[int(item.request_id)].extend(delta.token_ids)
    return found


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("llama-bias", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.soak),
    ],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kinds") / request.param, request.param)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return {
        name: write_adapter(base.parent / name, base, seed=seed, size=1.0, **fields)
        for seed, (name, fields) in enumerate(KINDS.items())
    }


@pytest.mark.parametrize("prefer", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_batch_of_all_kinds_has_the_answers_of_peft(base: Path, adapters: dict[str, Path], prefer: str) -> None:
    found = answers(base, adapters, prefer)
    plain = load_base(base)
    assert_greedy(plain, prompts()[:1], found[:1])
    for text, answer, path in zip(prompts()[1:], found[1:], adapters.values(), strict=False):
        assert_greedy(load_adapted(base, path), [text], [answer])


@pytest.mark.slow
def test_base_weights_are_those_that_peft_stored_next_to_the_factors(base: Path, adapters: dict[str, Path]) -> None:
    """PEFT stores the tables that factors change, too; equal ones take no memory."""
    model = Decoder.load(base, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    table = model.vocab_size * model.hidden_size * 4
    assert model.load_adapter("a", adapters["tied ends"], 64).nbytes < table
    assert model.load_adapter("a", adapters["saved"], 64).nbytes > 2 * table


def logits(path: Path, adapter: Path, dtype: torch.dtype = torch.float32, prefer: str = "auto") -> torch.Tensor:
    """Return the logits of the last token of a prompt with an adapter, float32 [V]."""
    model = Decoder.load(path, kernels.select_ops("cpu", dtype, prefer), dtype, "cpu")
    engine = Engine(model, EngineLimits(64, 8, 4, 64, model.max_model_len), (), None)
    engine.adapters.limit = 1
    engine.adapters.add(model.load_adapter("a", adapter, 64))
    found: list[torch.Tensor] = []
    forward = model.forward
    model.forward = lambda *args: found.append(forward(*args)) or found[-1]  # type: ignore[method-assign,func-returns-value]
    engine.add(GenerationRequest("0", "m", prompts()[3], SamplingParams(max_tokens=1, temperature=0.0), adapter="a"))
    while engine.has_work:
        engine.step()
    return found[0][0]


def of_peft(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        model = load_adapted(base, adapter).to(dtype)
        return model(torch.tensor([prompts()[3]])).logits[0, -1].float()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "dora ends", "saved", "tied ends", "tokens"])
def test_logits_are_those_of_peft(base: Path, adapters: dict[str, Path], name: str) -> None:
    expected = of_peft(base, adapters[name])
    torch.testing.assert_close(logits(base, adapters[name]), expected, rtol=1e-4, atol=1e-4)
    # In bfloat16, the error is of the size of that of PEFT.
    narrow = logits(base, adapters[name], torch.bfloat16, "reference")
    limit = (of_peft(base, adapters[name], torch.bfloat16) - expected).square().mean().sqrt()
    assert (narrow - expected).square().mean().sqrt() < 2 * limit


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["awq", "gptq-order", "fp8-block", "gguf"])
def test_lengths_of_dora_are_those_of_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", hidden_size=256, intermediate_size=256)
    if kind == "gguf":
        served, plain = write_gguf(source, tmp_path / "model.gguf", "F16"), source
    else:
        served = quantize_checkpoint(source, tmp_path / "served", kind)
        plain = served / "plain"
    adapter = write_adapter(tmp_path / "a", plain, use_dora=True, size=1.0)
    found, expected = logits(served, adapter), of_peft(plain, adapter)
    assert (found - expected).square().mean().sqrt() < 0.03 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2_5_vl"])
def test_the_text_of_a_vision_language_model_has_all_kinds(kind: str, tmp_path: Path) -> None:
    path = make_vision(tmp_path / kind, kind)
    adapter = write_adapter(
        tmp_path / "a", path, targets=r".*(language|text)_model.*\.(q_proj|embed_tokens)", use_dora=True, size=1.0,
        modules_to_save=["lm_head", "language_model.norm", "input_layernorm"],
    )  # fmt: skip
    torch.testing.assert_close(logits(path, adapter), of_peft(path, adapter), rtol=1e-4, atol=1e-4)


def test_changed_files_of_the_model_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    dora = write_adapter(tmp_path / "dora", path, use_dora=True)
    plain = write_adapter(tmp_path / "plain", path)
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    assert model.load_adapter("a", dora, 64).rank == 4
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert model.load_adapter("b", plain, 64).rank == 4  # which needs no base weights
    with pytest.raises(CheckpointError, match="the weights have changed since this worker has read them"):
        model.load_adapter("a", dora, 64)
    one, two = parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.touch()
    files = BaseFiles(one, lambda: Weights(path), "", "")
    two.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="the weights have changed"):
        files.open()
