"""Models that Transformers computes: unsuitable checkpoints are refused, with the reason in one line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.models.choice import choose_model
from quire.worker.models.transformers import bridge as transformers_backend
from quire.worker.models.transformers import trial as transformers_trial
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import read_transformers_config
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import load, refusal
from tests.support.transformers_checkpoints import (
    EXPERTS,
    LLAMA_LIKE,
    TOKENS,
    change,
    make_kind,
    make_other,
)

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        (
            "deepseek_v32",
            {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16}
            | {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "index_n_heads": 2, "index_head_dim": 32}
            | {"index_topk": 8},
            "its attention takes indices",
        ),
        ("doge", {}, "its attention has a mask of its own"),
        ("bert", {}, "neither causal nor those of a window"),
        ("cpmant", {}, "CpmAntForCausalLM has its attention written out in Transformers"),
        ("rwkv", {"attention_hidden_size": 64}, "3 of its 3 layers have no attention"),
        ("t5", {"d_model": 64, "d_kv": 16, "num_layers": 2}, "supported: causal language models"),
    ],
)
def test_models_whose_attention_is_another_are_refused_with_the_reason(
    model_type: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / model_type
    if model_type in ("t5", "cpmant"):
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": model_type, **TOKENS, **fields}))
        save_file({"weight": torch.zeros(1)}, path / WEIGHTS)
    else:
        make_other(path, model_type, **(LLAMA_LIKE | fields))
    assert why in refusal(path)


def test_a_mask_that_no_layer_uses_is_no_obstacle(tmp_path: Path) -> None:
    """Qwen2-MoE makes a mask for windows even without windows: its width is 0, and it hides every token."""
    path = make_other(tmp_path / "moe", "qwen2_moe", **(LLAMA_LIKE | EXPERTS | {"shared_expert_intermediate_size": 32}))
    assert {one.window for one in load(path).kernel_uses(16).attention} == {0}


def test_a_chunk_that_no_context_reaches_is_no_obstacle(tmp_path: Path) -> None:
    fields = {"attention_chunk_size": 32, "num_local_experts": 2, "head_dim": 16, "num_experts_per_tok": 1}
    path = make_other(tmp_path / "llama4", "llama4_text", **(LLAMA_LIKE | fields))
    assert {one.chunk for one in load(path, 32)._shapes} == {0}
    model = load(path, 33)
    assert {one.chunk for one in model._shapes} == {32}
    with pytest.raises(CheckpointError, match="chunks of attention of 32 tokens, no multiple of 64"):
        model.alloc_kv_cache(2, 64)


def test_chunks_on_a_gpu_are_refused_with_the_length_that_needs_none(tmp_path: Path) -> None:
    fields = {"attention_chunk_size": 32, "num_local_experts": 2, "head_dim": 16, "num_experts_per_tok": 1}
    path = make_other(tmp_path / "llama4", "llama4_text", **(LLAMA_LIKE | fields))
    config = read_transformers_config(path)
    said = transformers_backend.remedy_for(transformers_backend.CHUNKS_NEED_CPU, config, 256)
    assert said == "give --max-model-len 32, the length of its chunks of attention, or less"
    assert "heads of at most 512" in transformers_backend.remedy_for("something else", config, 256)


def test_a_model_that_says_something_else_over_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of this test ignores the positions given to it."""
    path = make_kind(tmp_path / "gpt2", "gpt2")
    from transformers import GPT2LMHeadModel

    forward = GPT2LMHeadModel.forward

    def careless(self: Any, input_ids: Any, position_ids: Any, logits_to_keep: Any, **rest: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])[None]
        return forward(self, input_ids, position_ids=positions, logits_to_keep=logits_to_keep, **rest)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", careless)
    assert "GPT2LMHeadModel gives other logits with paged attention than without" in refusal(path)


def test_positions_that_begin_elsewhere_than_at_zero_are_refused(tmp_path: Path) -> None:
    """RoBERTa counts positions from the id of its padding token, but uses given positions without this offset."""
    path = make_other(tmp_path / "roberta", "roberta", **(LLAMA_LIKE | {"is_decoder": True, "pad_token_id": 5}))
    assert "gives other logits with paged attention than without" in refusal(path)


def test_positions_that_are_counted_in_a_cache_are_refused(tmp_path: Path) -> None:
    """A model that scales queries by the length of the cache, in contexts longer than any test text."""
    fields = {"num_local_experts": 2, "head_dim": 16, "num_experts_per_tok": 1, "no_rope_layers": [1, 0, 1]}
    path = make_other(tmp_path / "llama4", "llama4_text", **(LLAMA_LIKE | fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_backend, "take_query_scales", lambda model: None)
        assert "it takes positions from the cache of Transformers" in refusal(path)
    assert load(path).max_model_len == 256


@pytest.mark.parametrize("prefer", ["auto", "reference"])
def test_a_token_that_looks_at_the_one_before_it_is_found_in_few_bits_too(
    prefer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short convolution looks at the token before. The logits differ by less than two ways of rounding may differ:
    plain torch, which computes bfloat16 on a processor with AVX2 only, rounds by the shape of the batch."""
    path = make_kind(tmp_path / "gpt2", "gpt2")
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    forward = GPT2MLP.forward

    def shifted(self: Any, hidden: Any) -> Any:
        out = forward(self, hidden)
        return out + 0.1 * torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]

    monkeypatch.setattr(GPT2MLP, "forward", shifted)
    ops = kernels.select_ops("cpu", torch.bfloat16, prefer)
    with pytest.raises(NotSupported, match="other logits in chunks and next to another text"):
        TransformersModel.load(read_transformers_config(path), ops, "cpu")


@pytest.mark.parametrize(("more", "why"), [(-9, "gives logits of 269 tokens, but vocab_size"), (1, "IndexError")])
def test_a_vocabulary_that_is_not_that_of_embedding_and_head_is_refused(more: int, why: str, tmp_path: Path) -> None:
    """A multimodal model can have a vocabulary size in its text configuration and another in its own configuration."""
    config = read_transformers_config(make_kind(tmp_path / "gpt2", "gpt2"))
    config = replace(config, vocab_size=VOCAB_SIZE + more)
    with pytest.raises(NotSupported, match=why):
        TransformersModel.load(config, kernels.select_ops("cpu", torch.float32), "cpu")


def test_positions_that_a_table_does_not_have_are_refused(tmp_path: Path) -> None:
    config = read_transformers_config(make_kind(tmp_path / "gpt2", "gpt2"))
    config = replace(config, max_position_embeddings=257, longest_context=257)
    with pytest.raises(NotSupported, match="IndexError"):
        TransformersModel.load(config, kernels.select_ops("cpu", torch.float32), "cpu")


def test_a_layer_that_is_left_out_in_some_steps_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention calls after a skipped layer would use the keys of another layer."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model = load(make_kind(tmp_path / "gpt2", "gpt2"))
    forward = GPT2Block.forward
    long = [torch.arange(16, dtype=torch.int32), torch.arange(3, dtype=torch.int32)]
    assert transformers_trial.over_pages(model, long).shape == (2, VOCAB_SIZE)
    second = model._model.transformer.h[1]

    def leaves_out(self: Any, hidden: Any, *args: Any, **rest: Any) -> Any:
        return hidden if self is second and hidden.shape[1] == 10 else forward(self, hidden, *args, **rest)

    monkeypatch.setattr(GPT2Block, "forward", leaves_out)
    with pytest.raises(RuntimeError, match="left out an attention call"):
        transformers_trial.over_pages(model, long)


def test_one_that_fails_over_pages_is_refused_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr("quire.worker.models.transformers.bridge.pack", lambda *_: 1 / 0)
    assert "cannot be computed with paged attention: ZeroDivisionError: division by zero" in refusal(path)


@pytest.mark.parametrize("of_triton", [False, True])
def test_a_fault_of_the_device_is_none_of_the_model(
    of_triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: Exception = torch.OutOfMemoryError("full")
    if of_triton:
        errors = pytest.importorskip("triton.runtime.errors")
        error = errors.OutOfResources(172160, 101376, "shared memory")

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("quire.worker.models.transformers.bridge.pack", fails)
    with pytest.raises(type(error)):
        load(make_kind(tmp_path / "gpt2", "gpt2"))


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    marker = tmp_path / "ran"
    (path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: ...\nclass M: ...\n")
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    change(path, auto_map=auto_map)
    load(path)  # Transformers knows the type, and uses its own class
    change(path, model_type="mine", architectures=["M"])
    assert 'model_type is "mine", which Transformers' in refusal(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "modelopt, mxfp4; use a checkpoint in one of these formats"),
        ({"compression_config": {"format": "dense"}}, "quant_method is missing"),
        ({"architectures": ["GPT2ForTokenClassification"]}, "supported: GPT2LMHeadModel, as model_type is gpt2"),
        ({"architectures": None, "model_type": "nothing"}, "pip install --upgrade transformers"),
        ({"n_head": "four"}, "Transformers cannot read it"),
        ({"n_embd": 80}, "tensor transformer.h.0.attn.c_attn.bias has the shape [192], expected [240]"),
        ({"vocab_size": VOCAB_SIZE + 1}, "tensor transformer.wte.weight has the shape"),
        ({"n_head": 0}, "Transformers cannot load it (ZeroDivisionError"),
        ({"activation_function": "none"}, "Transformers cannot load it (KeyError"),
        ({"vocab_size": 0}, "finds no vocab_size"),
        ({"add_cross_attention": True}, "attends to the states of an encoder"),
        ({"n_layer": 4}, "12 tensors are missing: transformer.h.3.attn.c_attn.bias"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations_that_do_not_fit_are_refused(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    change(path, **fields)
    assert why in refusal(path)


def test_heads_that_are_larger_than_those_of_any_kernel_are_refused(tmp_path: Path) -> None:
    path = make_other(tmp_path / "llama", "llama", **(LLAMA_LIKE | {"head_dim": 520}))
    said = refusal(path)
    assert "head_dim is 528" in said
    assert "with heads of at most 512 elements (256 on GPUs)" in said


@pytest.mark.parametrize("kind", ["llama-heads-of-20", "gpt2-heads-of-24"])
def test_heads_of_other_sizes_take_the_room_of_the_next_one_in_the_cache(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    model = load(path)
    [heads] = {one.kv_heads for one in model.kernel_uses(16).attention}
    assert model.kv_bytes_per_block(16) == 3 * 2 * heads * 32 * 16 * 4
    if kind.startswith("llama"):
        with pytest.raises(NotSupported, match=r"head_dim is 20; supported: a multiple of 16.*--model-impl auto"):
            choose_model(path, "quire")


@pytest.mark.parametrize(("kind", "prefer"), [("gpt2", "auto"), ("qwen3-moe", "reference")])
def test_later_changes_of_the_file_do_no_harm(kind: str, prefer: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    ops = kernels.select_ops("cpu", torch.float32, prefer)
    model = TransformersModel.load(read_transformers_config(path), ops, "cpu")
    texts = transformers_trial.texts(VOCAB_SIZE, 256)
    before = transformers_trial.over_pages(model, texts)
    with open(path / WEIGHTS, "r+b") as file:
        file.write(bytes((path / WEIGHTS).stat().st_size))
    assert torch.equal(transformers_trial.over_pages(model, texts), before)


@pytest.mark.parametrize(
    "fields", [{"transformers_weights": "other.bin"}, {"configuration_files": ["config.4.0.0.json"]}]
)
def test_other_files_than_those_that_are_checked_are_not_read(fields: dict[str, Any], tmp_path: Path) -> None:
    """Transformers would read these files, one of them a pickle, in place of config.json and model.safetensors."""
    path = make_kind(tmp_path / "gpt2", "gpt2")
    (path / "config.4.0.0.json").write_text((path / "config.json").read_text())
    torch.save(load_file(path / WEIGHTS), path / "other.bin")
    change(path, **fields)
    assert f"{next(iter(fields))} is " in refusal(path)


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    change(path, "adapter_config.json", base_model_name_or_path="some/where", peft_type="LORA")
    assert "this folder holds a model and an adapter (LoRA)" in refusal(path)


def test_experts_are_computed_by_what_transformers_has_itself(tmp_path: Path) -> None:
    """A checkpoint may name other kernels, which Transformers would download from the hub and run."""
    path = make_kind(tmp_path / "mixtral", "mixtral")
    change(path, experts_implementation="sonicmoe")
    assert load(path)._model.config._experts_implementation in ("grouped_mm", "eager")


def test_tensors_that_are_not_part_of_the_model_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    save_file(load_file(path / WEIGHTS) | {"extra.weight": torch.zeros(2)}, path / WEIGHTS, {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "1 tensors are not part of this model and are not used: extra.weight" in caplog.text


def test_loading_says_how_far_it_is(tmp_path: Path) -> None:
    config = read_transformers_config(make_kind(tmp_path / "gpt2", "gpt2"))
    read: list[tuple[int, int]] = []
    packed: list[tuple[int, int]] = []

    def note(said: list[tuple[int, int]]) -> Callable[[int, int], None]:
        return lambda done, total: said.append((done, total))

    TransformersModel.load(config, kernels.select_ops("cpu", torch.float32), "cpu", 0, note(read), note(packed))
    for said, least in (read, 10), (packed, 8):
        assert len(said) > least
        assert [done for done, _ in said] == sorted(done for done, _ in said)
        assert said[-1][0] == said[-1][1] == said[0][1], "all of it, in the end"
    assert packed[0][1] < read[0][1], "embeddings and norms are not packed"
