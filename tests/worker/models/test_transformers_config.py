"""The configuration of a model that Transformers computes: sizes, end tokens and the longest context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.shared.model.folder import WEIGHTS
from quire.worker.models.errors import NotSupported
from quire.worker.models.transformers_config import read_transformers_config
from tests.support.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE
from tests.support.parity import load, refusal
from tests.support.transformers_checkpoints import (
    YARN,
    change,
    make_kind,
)
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
