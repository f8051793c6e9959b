"""Which checkpoints Transformers computes, and what their configurations must say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.shared.model.fields import Fields
from quire.shared.model.folder import WEIGHTS
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.engine.offline import generate
from quire.worker.models.choice import choose_model
from quire.worker.models.native.config import ModelConfig
from quire.worker.models.native.families import (
    FAMILIES,
    _words_of_transformers,
    is_unknown_to_transformers,
    refuse_unsupported,
)
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import TransformersConfig, read_transformers_config
from tests.support.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, make_checkpoint
from tests.support.parity import GREEDY, by_hugging_face, load, load_own, make_engine, prompts, refusal
from tests.support.transformers_checkpoints import change, make_kind
from tests.support.vision_checkpoints import make_vision


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
    # The head is tied to the embedding, but the packed head is a second copy of its weights.
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
    assert read_transformers_config(path).eos_token_ids == (1,)  # the default of the model's configuration class


def rope_types(model: TransformersModel) -> list[Any]:
    return [module.rope_type for module in model._model.modules() if hasattr(module, "rope_type")]


def test_contexts_end_where_rope_would_change_for_all_tokens_at_once(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    path = make_kind(tmp_path / "phi3", "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert read_transformers_config(path).max_position_embeddings == 64
    assert read_transformers_config(path).longest_context == 256
    assert load(path).max_model_len == 64
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    path = make_kind(tmp_path / "llama", "llama-yarn", rope_parameters=dynamic)
    model = load(path)
    assert model.max_model_len == 256
    assert rope_types(model) == ["default"]


def test_each_kind_of_layer_may_have_a_rope_of_its_own(tmp_path: Path) -> None:
    long = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64, "factor": 4.0}
    long |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    parameters = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    model = load(make_kind(tmp_path / "gemma3", "gemma3", rope_parameters=parameters))
    assert model.max_model_len == 64
    assert rope_types(model) == [dict.fromkeys(parameters, "default")]


def test_a_context_that_is_too_long_says_which_field_makes_it_longer(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "yarn", "llama-yarn-beyond")
    said = refusal(path, 257)
    assert "--max-model-len is 257, but the longest context of the model is 256" in said
    assert "for longer contexts set factor in rope_parameters of config.json to 5" in said
    values = json.loads((path / "config.json").read_text())
    change(path, rope_parameters=values["rope_parameters"] | {"factor": 5})
    assert load(path, 257).max_model_len == 257
    # GPT-2 has learned positions, one per row of a table.
    assert refusal(make_kind(tmp_path / "gpt2", "gpt2"), 257).endswith("--max-model-len from 1 to 256, or 0 for 256")


def test_a_type_with_two_classes_is_that_of_the_class_that_the_checkpoint_names(tmp_path: Path) -> None:
    path = make_vision(tmp_path / "qwen3_5", "qwen3_5")

    def found(*names: str) -> tuple[str, str]:
        change(path, architectures=list(names) or None)
        config = read_transformers_config(path)
        return config.architecture, config.loaded.model_type

    assert found("Qwen3_5ForConditionalGeneration") == ("Qwen3_5ForConditionalGeneration", "qwen3_5")
    assert found("Qwen3_5ForCausalLM") == ("Qwen3_5ForCausalLM", "qwen3_5_text")
    assert found() == ("Qwen3_5ForConditionalGeneration", "qwen3_5")
    with pytest.raises(NotSupported, match="supported: Qwen3_5ForCausalLM or Qwen3_5ForConditionalGeneration, as"):
        found("Qwen3_5")


def test_quires_own_decoder_is_chosen_wherever_it_knows_the_model(tmp_path: Path) -> None:
    own, other = make_checkpoint(tmp_path / "llama", "llama"), make_kind(tmp_path / "gpt2", "gpt2")
    assert isinstance(choose_model(own), ModelConfig)
    assert isinstance(choose_model(own, "quire"), ModelConfig)
    assert isinstance(choose_model(own, "transformers"), TransformersConfig)
    assert isinstance(choose_model(other), TransformersConfig)
    with pytest.raises(NotSupported, match="architectures"):
        choose_model(other, "quire")


@pytest.mark.parametrize(("kind", "fields"), [("llama-yarn", {"head_dim": 24}), ("llama-gelu", {})])
def test_a_known_family_with_a_field_that_the_decoder_lacks_goes_to_transformers(
    kind: str, fields: dict[str, int], tmp_path: Path
) -> None:
    assert isinstance(choose_model(make_kind(tmp_path / kind, kind, **fields)), TransformersConfig)


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


@pytest.mark.parametrize("kind", ["internlm3", "iquestcoder"])
def test_a_type_that_transformers_computes_as_llama_goes_to_transformers(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    config = choose_model(path)
    assert isinstance(config, TransformersConfig)
    assert config.architecture == "LlamaForCausalLM"
    with pytest.raises(NotSupported, match=f'model_type is "{kind}"; supported: llama'):
        choose_model(path, "quire")


def test_the_hub_name_of_iquest_coder_goes_to_the_own_decoder(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "iquestcoder", "iquestcoder")
    expected = by_hugging_face(path)
    change(path, architectures=["IQuestCoderForCausalLM"], use_sliding_window=False, clip_qkv=None)
    assert isinstance(choose_model(path), ModelConfig)
    assert [choices[0] for choices in generate(make_engine(load_own(path)), prompts(), GREEDY)] == expected
    change(path, clip_qkv=1.0)
    with pytest.raises(NotSupported, match=r"clip_qkv is 1\.0; supported: no such field"):
        choose_model(path, "quire")


def test_another_name_of_a_class_is_taken_only_if_it_is_named_after_the_type(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "phimoe", "phimoe")
    for name in ("PhimoeForCausalLM", "PhiMoEForCausalLM"):
        change(path, architectures=[name])
        assert choose_model(path).architecture == "PhimoeForCausalLM"
    others = ("PhiMoEForSequenceClassification", "PhiMoEModel", "PhiForCausalLM", "BitnetForCausalLM", 3)
    for names in [*([name] for name in others), ["PhiMoEForCausalLM"] * 2, "PhiMoEForCausalLM", []]:
        change(path, architectures=names)
        with pytest.raises(NotSupported, match=r"supported: Phimoe\w+, as model_type is phimoe; correct the"):
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


def fields(architecture: str, **values: Any) -> Fields:
    return Fields({"architectures": [architecture], "model_type": FAMILIES[architecture].model_type} | values, "here")


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shared_expert_intermediate_size", 32),
        ("experts_implementation", "other"),
        ("final_logit_softcapping", 30.0),
        ("attention_chunk_size", 128),
        ("hidden_act", "gelu"),
    ],
)
def test_a_field_that_a_family_does_not_know_is_refused(architecture: str, name: str, value: Any) -> None:
    refuse_unsupported(fields(architecture), FAMILIES[architecture])
    refuse_unsupported(fields(architecture, **{name: None}), FAMILIES[architecture])
    with pytest.raises(CheckpointError, match=f"{name} is "):
        refuse_unsupported(fields(architecture, **{name: value}), FAMILIES[architecture])


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.own_fields is not None])
def test_a_field_that_transformers_does_not_know_either_is_left_out(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    needed = {names[-1]: {} for names in FAMILIES[architecture].needed}
    refuse_unsupported(fields(architecture, unsloth_version="2026.9.1", **needed), FAMILIES[architecture])
    assert "here: unsloth_version is not used: Transformers does not read this field, either" in caplog.text


@pytest.mark.parametrize("missing", ["layer_types", "eos_token_id", "rope_parameters"])
def test_a_default_of_transformers_that_the_decoder_lacks_is_left_to_it(missing: str) -> None:
    family = FAMILIES["CwmForCausalLM"]
    needed: dict[str, Any] = {"layer_types": [], "eos_token_id": 2, "rope_parameters": {"rope_theta": 1.0}}
    refuse_unsupported(fields("CwmForCausalLM", **needed), family)
    with pytest.raises(NotSupported, match=f"{missing} is null; supported: a value"):
        refuse_unsupported(fields("CwmForCausalLM", **(needed | {missing: None})), family)


def test_without_transformers_no_field_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_unknown_to_transformers("unsloth_version", "gemma2")
    assert not is_unknown_to_transformers("unsloth-version", "gemma2")
    _words_of_transformers.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not is_unknown_to_transformers("unsloth_version", "gemma2")
    _words_of_transformers.cache_clear()


def test_windows_of_all_layers_of_qwen3_moe_are_left_to_transformers() -> None:
    family = FAMILIES["Qwen3MoeForCausalLM"]
    refuse_unsupported(fields("Qwen3MoeForCausalLM", use_sliding_window=False, sliding_window=4096), family)
    with pytest.raises(NotSupported, match="use_sliding_window is true"):
        refuse_unsupported(fields("Qwen3MoeForCausalLM", use_sliding_window=True), family)


GPT_OSS = {"rope_scaling": {"rope_type": "yarn"}, "experts_per_token": 4, "initial_context_length": 4096}


@pytest.mark.parametrize(
    ("architecture", "values", "name"),
    [
        ("GptOssForCausalLM", GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("GptOssForCausalLM", GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("GptOssForCausalLM", GPT_OSS | {"experts_per_token": 3}, "experts_per_token"),
        ("GptOssForCausalLM", GPT_OSS | {"rope_scaling": None}, "rope_parameters"),
        ("GptOssForCausalLM", GPT_OSS | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"hidden_activation": "silu"}, "hidden_activation"),
        ("Gemma2ForCausalLM", {"embedding_multiplier": 2.0}, "embedding_multiplier"),
        ("Gemma2ForCausalLM", {"attn_implementation": "x"}, "attn_implementation"),
    ],
)
def test_values_that_the_kernels_do_not_compute_are_refused(
    architecture: str, values: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is "):
        refuse_unsupported(fields(architecture, **values), FAMILIES[architecture])
