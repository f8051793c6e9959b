"""Which checkpoints Transformers computes, and what is refused: with the reason, in one line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire import kernels
from quire.shared.errors import StartError
from quire.worker.device import devices
from quire.worker.models import transformers_trial
from quire.worker.models.choice import choose_model
from quire.worker.models.config import ModelConfig
from quire.worker.models.errors import CheckpointError, NotSupported
from quire.worker.models.transformers_attention import AttentionProbe, UnsupportedAttention
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import TransformersConfig, read_transformers_config
from quire.worker.models.transformers_linear import LinearUses, PackedLinearModule, pack
from quire.worker.settings import WorkerSettings
from tests.worker.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, make_checkpoint
from tests.worker.transformers_checkpoints import (
    EXPERTS,
    GRANITE_HYBRID,
    LLAMA_LIKE,
    TOKENS,
    YARN,
    change,
    make_kind,
    make_other,
)

WEIGHTS = "model.safetensors"


def load(path: Path, max_model_len: int = 0) -> TransformersModel:
    ops = kernels.select_ops("cpu", torch.float32)
    return TransformersModel.load(read_transformers_config(path), ops, "cpu", max_model_len)


def refusal(path: Path, max_model_len: int = 0) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, max_model_len)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said


# What computes it


def test_quires_own_decoder_is_chosen_wherever_it_knows_the_model(tmp_path: Path) -> None:
    own, other = make_checkpoint(tmp_path / "llama", "llama"), make_kind(tmp_path / "gpt2", "gpt2")
    assert isinstance(choose_model(own), ModelConfig)
    assert isinstance(choose_model(own, "quire"), ModelConfig)
    assert isinstance(choose_model(own, "transformers"), TransformersConfig)
    assert isinstance(choose_model(other), TransformersConfig)
    with pytest.raises(NotSupported, match="architectures"):
        choose_model(other, "quire")


@pytest.mark.parametrize("kind", ["llama-yarn", "llama-gelu"])
def test_a_known_family_with_a_field_that_the_decoder_lacks_goes_to_transformers(kind: str, tmp_path: Path) -> None:
    assert isinstance(choose_model(make_kind(tmp_path / kind, kind)), TransformersConfig)


def test_what_is_wrong_with_a_checkpoint_is_said_and_not_tried_otherwise(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama", "llama")
    change(path, num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="num_key_value_heads is 3; supported: a divisor") as caught:
        choose_model(path)
    assert not isinstance(caught.value, NotSupported)


def test_without_transformers_the_error_says_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NotSupported, match=r"GPT2LMHeadModel.*Llama.*; install Transformers"):
        choose_model(path)
    assert isinstance(choose_model(Path("models/demo")), ModelConfig)


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    config = choose_model(make_kind(tmp_path / "gpt2", "gpt2"))
    device = torch.device("cpu")
    devices.check_ranks(WorkerSettings(), device, config)
    with pytest.raises(StartError, match=r"--tensor-parallel-size 2: GPT2LMHeadModel .* lower it to 1"):
        devices.check_ranks(WorkerSettings(tensor_parallel_size=2), device, config)


@pytest.mark.parametrize("kind", ["internlm3", "iquestcoder"])
def test_a_type_that_transformers_computes_as_llama_goes_to_transformers(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    config = choose_model(path)
    assert isinstance(config, TransformersConfig)
    assert config.architecture == "LlamaForCausalLM"
    with pytest.raises(NotSupported, match=f'model_type is "{kind}"; supported: llama'):
        choose_model(path, "quire")


def test_another_name_of_a_class_is_taken_only_if_it_is_named_after_the_type(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "phimoe", "phimoe")
    for name in ("PhimoeForCausalLM", "PhiMoEForCausalLM"):
        change(path, architectures=[name])
        assert choose_model(path).architecture == "PhimoeForCausalLM"
    others = ("PhiMoEForSequenceClassification", "PhiMoEModel", "PhiForCausalLM", "BitnetForCausalLM", 3)
    for names in [*([name] for name in others), ["PhiMoEForCausalLM"] * 2, "PhiMoEForCausalLM", []]:
        change(path, architectures=names)
        with pytest.raises(NotSupported, match=r"supported: PhimoeForCausalLM, as model_type is phimoe; correct the"):
            read_transformers_config(path)


def test_another_name_is_not_taken_for_a_model_with_more_tensors(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "phimoe", "phimoe")
    save_file(load_file(path / WEIGHTS) | {"extra.weight": torch.zeros(2)}, path / WEIGHTS, {"format": "pt"})
    load(path)
    change(path, architectures=["PhiMoEForCausalLM"])
    said = refusal(path)
    assert "1 tensors are not part of PhimoeForCausalLM, which its model_type is: extra.weight" in said
    assert 'set architectures to ["PhimoeForCausalLM"] in config.json' in said


def test_a_type_that_transformers_does_not_know_says_which_field_to_set(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama", "llama")
    change(path, model_type="mine")
    with pytest.raises(NotSupported, match=r'model_type is "mine", which Transformers .* set model_type to "llama"'):
        choose_model(path)
    change(path, model_type="llama")
    assert isinstance(choose_model(path), ModelConfig)


# What is read of a checkpoint


def test_what_is_known_before_the_weights_are_read(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    config = read_transformers_config(path)
    assert (config.architecture, config.num_layers) == ("GPT2LMHeadModel", 3)
    assert (config.vocab_size, config.max_position_embeddings) == (VOCAB_SIZE, 256)
    assert config.eos_token_ids == (EOS_TOKEN_ID,)
    stored = sum(tensor.numel() for tensor in load_file(path / WEIGHTS).values())
    assert config.least_weight_bytes(torch.bfloat16) == 2 * stored
    model = load(path)
    assert model.vocab_size == VOCAB_SIZE
    # The head is tied to the embedding, and packed beside it.
    assert model.weight_bytes == pytest.approx(4 * (stored + VOCAB_SIZE * 64), rel=0.05)
    assert model.kv_bytes_per_block(16) == 3 * 2 * 64 * 16 * 4


def test_end_tokens_are_those_of_the_generation_config_then_of_the_config(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    change(path, "generation_config.json", eos_token_id=[5, VOCAB_SIZE + 3, 7])
    assert read_transformers_config(path).eos_token_ids == (5, 7)
    (path / "generation_config.json").unlink()
    change(path, eos_token_id=9)
    assert read_transformers_config(path).eos_token_ids == (9,)
    path = make_kind(tmp_path / "gemma3", "gemma3")
    (path / "generation_config.json").unlink(missing_ok=True)
    values = json.loads((path / "config.json").read_text())
    del values["eos_token_id"]
    (path / "config.json").write_text(json.dumps(values))
    assert read_transformers_config(path).eos_token_ids == (1,)  # the default of its class


def test_contexts_end_where_rope_would_change_for_all_tokens_at_once(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    path = make_kind(tmp_path / "phi3", "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert read_transformers_config(path).max_position_embeddings == 64
    assert refusal(path, 65).endswith(
        "the longest context of the model is 64; give --max-model-len from 1 to 64, or 0 for 64"
    )
    assert load(path).max_model_len == 64
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    path = make_kind(tmp_path / "llama", "llama-yarn", rope_parameters=dynamic)
    model = load(path)
    assert model.max_model_len == 256
    kinds = [module.rope_type for module in model._model.modules() if hasattr(module, "rope_type")]
    assert kinds == ["default"]


def test_each_kind_of_layer_may_have_a_rope_of_its_own(tmp_path: Path) -> None:
    long = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64, "factor": 4.0}
    long |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    parameters = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    model = load(make_kind(tmp_path / "gemma3", "gemma3", rope_parameters=parameters))
    assert model.max_model_len == 64
    kinds = [module.rope_type for module in model._model.modules() if hasattr(module, "rope_type")]
    assert kinds == [dict.fromkeys(parameters, "default")]


def test_yarn_has_frequencies_that_never_change(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "llama", "llama-yarn", rope_parameters=YARN)
    assert read_transformers_config(path).max_position_embeddings == 256


def test_a_context_that_is_too_long_says_which_field_makes_it_longer(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "yarn", "llama-yarn-beyond")
    said = refusal(path, 257)
    assert "--max-model-len is 257, but the longest context of the model is 256" in said
    assert "for longer contexts set factor in rope_parameters of config.json to 5" in said
    values = json.loads((path / "config.json").read_text())
    change(path, rope_parameters=values["rope_parameters"] | {"factor": 5})
    assert load(path, 257).max_model_len == 257
    # The positions of GPT-2 are learned.
    assert refusal(make_kind(tmp_path / "gpt2", "gpt2"), 257).endswith("--max-model-len from 1 to 256, or 0 for 256")


# What is refused


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        ("gemma2", {"head_dim": 16}, "its attention takes softcap"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, "its attention takes s_aux"),
        ("doge", {}, "its attention has a mask of its own"),
        ("bert", {}, "neither causal nor those of a window"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM has its attention written out in Transformers"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "2 of its 3 layers have no attention"),
        ("llama4_text", {"attention_chunk_size": 32, "num_local_experts": 2, "head_dim": 16}, "neither causal nor"),
        ("mamba", {"state_size": 4}, "keeps a state besides keys and values"),
        ("t5", {"d_model": 64, "d_kv": 16, "num_layers": 2}, "supported: causal language models"),
    ],
)
def test_models_whose_attention_is_another_are_refused_with_the_reason(
    model_type: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / model_type
    if model_type in ("mamba", "t5", "bloom"):
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": model_type, **TOKENS, **fields}))
        save_file({"weight": torch.zeros(1)}, path / WEIGHTS)
    else:
        make_other(path, model_type, **(LLAMA_LIKE | fields))
    assert why in refusal(path)


def test_a_model_of_a_class_with_states_is_refused_if_a_layer_has_one(tmp_path: Path) -> None:
    kinds = ["attention", "mamba", "attention"]
    fields = LLAMA_LIKE | GRANITE_HYBRID | {"layer_types": kinds}
    path = make_other(tmp_path / "granite", "granitemoehybrid", **fields)
    assert "keeps a state besides keys and values; Quire serves decoder-only models" in refusal(path)


def test_a_mask_that_no_layer_uses_is_no_obstacle(tmp_path: Path) -> None:
    """Qwen2-MoE makes one for windows also where it has none: their width is 0, and it hides everything."""
    path = make_other(tmp_path / "moe", "qwen2_moe", **(LLAMA_LIKE | EXPERTS | {"shared_expert_intermediate_size": 32}))
    assert {one.sliding_window for one in load(path)._shapes} == {0}


def test_a_chunk_that_no_context_reaches_is_no_obstacle(tmp_path: Path) -> None:
    fields = {"attention_chunk_size": 32, "num_local_experts": 2, "head_dim": 16, "num_experts_per_tok": 1}
    path = make_other(tmp_path / "llama4", "llama4_text", **(LLAMA_LIKE | fields))
    assert load(path, 32).max_model_len == 32
    said = refusal(path, 33)
    assert "neither causal nor" in said
    assert "give --max-model-len 32, the length of its chunks" in said


def test_a_model_that_says_something_else_over_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would that ignores the positions that it is given."""
    path = make_kind(tmp_path / "gpt2", "gpt2")
    from transformers import GPT2LMHeadModel

    forward = GPT2LMHeadModel.forward

    def careless(self: Any, input_ids: Any, position_ids: Any, logits_to_keep: Any, **rest: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])[None]
        return forward(self, input_ids, position_ids=positions, logits_to_keep=logits_to_keep, **rest)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", careless)
    assert "GPT2LMHeadModel gives other logits with paged attention than without" in refusal(path)


def test_positions_that_begin_elsewhere_than_at_zero_are_refused(tmp_path: Path) -> None:
    """RoBERTa counts from the number of its padding token: what it is given here it takes as it is."""
    path = make_other(tmp_path / "roberta", "roberta", **(LLAMA_LIKE | {"is_decoder": True, "pad_token_id": 5}))
    assert "gives other logits with paged attention than without" in refusal(path)


def test_positions_that_are_counted_in_a_cache_are_refused(tmp_path: Path) -> None:
    """Llama 4 scales queries by them where it rotates nothing: in contexts that no short text reaches."""
    fields = {"num_local_experts": 2, "head_dim": 16, "num_experts_per_tok": 1, "no_rope_layers": [1, 0, 1]}
    path = make_other(tmp_path / "llama4", "llama4_text", **(LLAMA_LIKE | fields))
    assert "it takes positions from the cache of Transformers" in refusal(path)
    change(path, attn_temperature_tuning=False)
    assert load(path).max_model_len == 256


@pytest.mark.parametrize("prefer", ["auto", "reference"])
def test_a_token_that_looks_at_the_one_before_it_is_found_in_few_bits_too(
    prefer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short convolution looks back so. The logits are apart by less than what two ways of rounding may be; plain
    torch, which computes bfloat16 on a processor with AVX2 only, rounds by the shape of the batch."""
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
    """As where the configurations of a text and of the whole have one each."""
    config = read_transformers_config(make_kind(tmp_path / "gpt2", "gpt2"))
    config = replace(config, vocab_size=VOCAB_SIZE + more)
    with pytest.raises(NotSupported, match=why):
        TransformersModel.load(config, kernels.select_ops("cpu", torch.float32), "cpu")


def test_positions_that_a_table_does_not_have_are_refused(tmp_path: Path) -> None:
    config = read_transformers_config(make_kind(tmp_path / "gpt2", "gpt2"))
    config = replace(config, max_position_embeddings=257)
    with pytest.raises(NotSupported, match="IndexError"):
        TransformersModel.load(config, kernels.select_ops("cpu", torch.float32), "cpu")


def test_a_layer_that_is_left_out_in_some_steps_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls behind it would have the keys of another."""
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
    monkeypatch.setattr("quire.worker.models.transformers_backend.pack", lambda *_: 1 / 0)
    assert "cannot be computed with paged attention: ZeroDivisionError: division by zero" in refusal(path)


def test_memory_that_runs_out_is_no_fault_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("quire.worker.models.transformers_backend.pack", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(make_kind(tmp_path / "gpt2", "gpt2"))


def test_a_kernel_that_triton_cannot_compile_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    def fails(*_: Any) -> None:
        raise errors.OutOfResources(172160, 101376, "shared memory")

    monkeypatch.setattr("quire.worker.models.transformers_backend.pack", fails)
    with pytest.raises(errors.OutOfResources):
        load(make_kind(tmp_path / "gpt2", "gpt2"))


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    marker = tmp_path / "ran"
    (path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: ...\nclass M: ...\n")
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    change(path, auto_map=auto_map)
    load(path)  # Transformers knows the type, and takes its own
    change(path, model_type="mine", architectures=["M"])
    assert 'model_type is "mine", which Transformers' in refusal(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "weights that are not quantised"),
        ({"compression_config": {"format": "dense"}}, "weights that are not quantised"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "supported: GPT2LMHeadModel, as model_type is gpt2"),
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
    [heads] = {one.num_kv_heads for one in model._shapes}
    assert model.kv_bytes_per_block(16) == 3 * 2 * heads * 32 * 16 * 4
    if kind.startswith("llama"):
        with pytest.raises(NotSupported, match=r"head_dim is 20; supported: a multiple of 16.*--model-impl auto"):
            choose_model(path, "quire")


def test_weights_that_are_missing_infinite_or_pickled_are_refused(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    tensors = load_file(path / WEIGHTS)
    name = "transformer.h.1.mlp.c_fc.weight"
    without = {key: value for key, value in tensors.items() if key != name}
    save_file(without, path / WEIGHTS, {"format": "pt"})
    assert f"1 tensors are missing: {name}" in refusal(path)
    tensors[name][0, 0] = float("inf")
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    assert f"tensor {name} has values that are not finite as float32; take another --dtype, or" in refusal(path)
    save_file(tensors | {name: tensors[name].to(torch.int32)}, path / WEIGHTS, {"format": "pt"})
    assert "has the type I32" in refusal(path)
    (path / WEIGHTS).unlink()
    (path / "pytorch_model.bin").write_bytes(b"x")
    assert "pickle format" in refusal(path)


@pytest.mark.parametrize("prefer", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3-moe"])
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
    """Transformers would take these in place of config.json and model.safetensors, and a pickle among them."""
    path = make_kind(tmp_path / "gpt2", "gpt2")
    (path / "config.4.0.0.json").write_text((path / "config.json").read_text())
    torch.save(load_file(path / WEIGHTS), path / "other.bin")
    change(path, **fields)
    assert f"{next(iter(fields))} is " in refusal(path)


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    change(path, "adapter_config.json", base_model_name_or_path="some/where", peft_type="LORA")
    assert "this folder holds a model and an adapter (LoRA)" in refusal(path)


def test_a_layer_in_two_places_is_packed_once_and_one_of_another_type_is_left() -> None:
    shared, exact, head = nn.Linear(32, 32), nn.Linear(32, 4).double(), nn.Linear(32, 8, bias=False)
    model: Any = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, exact), "head": head})
    model.get_output_embeddings = lambda: head
    x = torch.randn(3, 32).bfloat16()
    shared.bfloat16(), head.bfloat16()
    expected = shared(x)
    pack(model, kernels.select_ops("cpu", torch.bfloat16, "reference"))
    assert isinstance(model["a"][0], PackedLinearModule)
    assert model["a"][0] is model["b"][0]
    assert model["b"][1] is exact
    torch.testing.assert_close(model["a"](x), expected, rtol=0.02, atol=0.02)
    assert model["head"](x).dtype is torch.float32


def test_experts_are_computed_by_what_transformers_has_itself(tmp_path: Path) -> None:
    """Others that a checkpoint may name would be fetched from the hub, and run."""
    path = make_kind(tmp_path / "mixtral", "mixtral")
    change(path, experts_implementation="sonicmoe")
    assert load(path)._model.config._experts_implementation in ("grouped_mm", "eager")


def test_tensors_that_are_not_part_of_the_model_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    save_file(load_file(path / WEIGHTS) | {"extra.weight": torch.zeros(2)}, path / WEIGHTS, {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "1 tensors are not part of this model and are not used: extra.weight" in caplog.text


# Which layers are packed


class Reader(nn.Module):
    """Uses each of its layers in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.called, self.asked, self.unused, self.both, self.bias_read = (nn.Linear(32, 32) for _ in range(5))
        self.read = nn.Linear(32, 32, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.called(self.embedding(ids))
        x = self.asked(x.to(self.asked.weight.dtype).to(self.asked.weight.device))
        x = x @ self.read.weight.type(torch.float32).T
        x = self.both(x) * torch.cat([self.both.weight, self.both.weight]).mean()
        x = self.bias_read(x) + self.bias_read.bias
        return self.head(self.experts[1](x))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_layer_whose_weight_is_read_is_left_to_torch() -> None:
    model, ids = Reader(), torch.arange(8)
    before = dict(model.named_parameters(remove_duplicate=False))
    expected = model(ids)
    with torch.inference_mode(), LinearUses(model) as uses:
        torch.testing.assert_close(model(ids), expected)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    model.requires_grad_(False)
    pack(model, kernels.select_ops("cpu", torch.float32, "reference"), None, uses.unpackable())
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinearModule)}
    assert packed == {"called", "asked", "experts.0", "experts.1", "experts.2", "head"}
    assert set(uses.left_to_torch(model)) == {model.read, model.both, model.bias_read}
    torch.testing.assert_close(model(ids), expected)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_model_with_such_a_layer_does_not_promise_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    path = make_kind(tmp_path / "gpt2", "gpt2")
    assert load(path).is_row_invariant
    expected = transformers_trial.over_pages(load(path), transformers_trial.texts(VOCAB_SIZE, 256))

    def written_out(self: Any, hidden: Any) -> Any:
        return self.c_proj(self.act(hidden @ self.c_fc.weight + self.c_fc.bias))

    monkeypatch.setattr(GPT2MLP, "forward", written_out)
    model = load(path)
    assert not model.is_row_invariant
    assert isinstance(model._model.transformer.h[0].mlp.c_proj, PackedLinearModule)
    found = transformers_trial.over_pages(model, transformers_trial.texts(VOCAB_SIZE, 256))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# What is asked of attention


def asked(**changes: Any) -> AttentionProbe:
    examination = AttentionProbe(torch.float32, 64)
    q, k, v = torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16)
    call = {"q": q, "k": k, "v": v, "attention_mask": torch.zeros(1, 1, 2, 2), "module": SimpleNamespace()}
    examination.attend(**(call | changes))
    return examination


def test_what_a_call_of_attention_asks_for_is_noted() -> None:
    [one] = asked().shapes
    assert (one.num_heads, one.num_kv_heads, one.head_dim, one.value_dim) == (4, 2, 16, 16)
    assert (one.scale, one.sliding_window) == (0.25, 0)
    [one] = asked(scaling=2.0, sliding_window=5, attention_mask=torch.full((1, 1, 2, 2), 5.0)).shapes
    assert (one.scale, one.sliding_window) == (2.0, 5)
    [one] = asked(v=torch.zeros(1, 2, 2, 4)).shapes
    assert (one.value_dim, one.scale) == (4, 0.25)  # by the width of keys
    [one] = asked(sliding_window=64).shapes  # wider than any context
    assert one.sliding_window == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"softcap": 30.0}, "takes softcap"),
        ({"s_aux": torch.zeros(4)}, "takes s_aux"),
        ({"attention_mask": None}, "not causal"),
        ({"is_causal": False}, "not causal"),
        ({"module": SimpleNamespace(is_causal=False)}, "not causal"),
        ({"attention_mask": torch.full((1, 1, 2, 2), 5.0)}, "a mask of its own"),
        ({"sliding_window": 5}, "a mask of its own"),
        ({"attention_mask": torch.full((1, 1, 2, 2), -1.0)}, "its masks are neither"),
        ({"attention_mask": torch.tensor([[[[0.0, 1.0]]]])}, "a mask of its own"),
        ({"q": torch.zeros(1, 3, 2, 16)}, "its heads are"),
        ({"v": torch.zeros(1, 2, 2, 32)}, "its heads are"),
        ({"v": torch.zeros(1, 4, 2, 16)}, "its heads are"),
        ({"k": torch.zeros(1, 2, 3, 16), "v": torch.zeros(1, 2, 3, 16)}, "its heads are"),
        ({"k": torch.zeros(2, 2, 2, 16), "v": torch.zeros(2, 2, 2, 16)}, "its heads are"),
        ({"k": torch.zeros(1, 2, 2, 32)}, "its heads are"),
        ({"q": torch.zeros(1, 4, 2, 16).double()}, "in torch.float64"),
        ({"scaling": -1.0}, "scaled by -1.0"),
        ({"scaling": 0.0}, "scaled by 0.0"),
        ({"scaling": float("nan")}, "scaled by nan"),
    ],
)
def test_what_attention_cannot_do_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedAttention, match=why):
        asked(**changes)


def masks(kind: str) -> Any:
    from transformers import masking_utils

    return {
        "causal": masking_utils.causal_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(9),
        "wide": masking_utils.sliding_window_causal_mask_function(64),
        "chunks": masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda batch, head, q, kv: q // 16 == kv // 16
        ),
        "both ways": lambda batch, head, q, kv: kv >= 0,
        "prefix": lambda batch, head, q, kv: (kv <= q) | (kv < 10),
        "none": lambda batch, head, q, kv: kv < 0,
    }[kind]


@pytest.mark.parametrize(("kind", "width"), [("causal", 0), ("window", 9), ("wide", 0)])
def test_the_width_of_a_mask(kind: str, width: int) -> None:
    assert AttentionProbe(torch.float32, 64).width_of(masks(kind)) == width


@pytest.mark.parametrize("kind", ["chunks", "both ways", "prefix", "none"])
def test_masks_that_are_neither_causal_nor_a_window_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedAttention, match="its masks are neither causal nor"):
        AttentionProbe(torch.float32, 64).width_of(masks(kind))


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
