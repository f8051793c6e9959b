"""Metadata becomes the fields of `config.json`; a key that would change results is translated or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.shared.gguf.config import generation_config, model_config, rope_factors
from quire.shared.gguf.errors import GGUFError
from quire.shared.gguf.file import GGUFFile, open_gguf
from quire.worker.models.config import read_config
from tests.support.gguf_bytes import gguf_bytes, tensor
from tests.support.gguf_vocabularies import TOKENS, write_vocabulary


def file(folder: Path, **changes: Any) -> GGUFFile:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return open_gguf(write_vocabulary(folder / "a.gguf", changes))


def test_the_fields_are_those_of_config_json(tmp_path: Path) -> None:
    assert model_config(file(tmp_path)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2, TOKENS.index("<|im_end|>")],
        "dtype": "float16",
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_a_window_makes_a_mistral_model(tmp_path: Path) -> None:
    assert read_config(file(tmp_path, llama__attention__sliding_window=64).path).sliding_windows == (64,)
    for window in (0, 128, 4096):
        assert read_config(file(tmp_path, llama__attention__sliding_window=window).path).sliding_windows == (0,)


def test_values_may_be_given_for_each_layer(tmp_path: Path) -> None:
    assert model_config(file(tmp_path, llama__attention__head_count_kv=[2]))["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
        {"llama__rope__scale_linear": 4.0},
    ],
)
def test_linear_scaling_is_read_in_the_newer_and_the_older_form(changes: dict[str, Any], tmp_path: Path) -> None:
    assert model_config(file(tmp_path, **changes))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama__block_count": None}, "'llama.block_count' is missing, expected an integer from 1 to 10000"),
        ({"llama__block_count": 0}, "'llama.block_count' is 0"),
        ({"llama__context_length": "8"}, "'llama.context_length' is '8', expected an integer"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        (
            {"llama__attention__head_count": 3},
            "'llama.attention.head_count' is 3, expected a divisor of embedding_length",
        ),
        (
            {"llama__attention__head_count_kv": [1, 2]},
            "is an array of 2, expected the same integer for each of 1 layers",
        ),
        (
            {"llama__attention__key_length": 24},
            "'llama.attention.key_length' is 24, expected heads whose size is a multi",
        ),
        ({"llama__attention__value_length": 32}, "'llama.attention.value_length' is 32, expected 16"),
        ({"llama__rope__dimension_count": 8}, "'llama.rope.dimension_count' is 8, expected 16"),
        ({"llama__rope__scaling__type": "yarn"}, "'llama.rope.scaling.type' is 'yarn', expected none or linear"),
        ({"llama__rope__scaling__factor": 2.0}, "'llama.rope.scaling.type' is missing, expected linear"),
        ({"llama__expert_count": 8}, "'llama.expert_count' is 8, expected no such key, or 0; give the Hugging Face"),
        ({"llama__attention__something": 1}, "'llama.attention.something' is 1, expected no such key"),
        ({"llama__logit_scale": [1.0]}, "'llama.logit_scale' is an array of 1, expected no such key"),
        ({"split__count": 3}, "'split.count' is 3, expected one file; merge the parts with llama-gguf-split --merge"),
        ({"tokenizer__ggml__tokens": [f"t{at}" for at in range(999)]}, "has 293 rows, expected 999 or more"),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_key(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    changed = file(tmp_path, **changes)
    with pytest.raises(GGUFError, match=said) as caught:
        model_config(changed)
    assert str(caught.value).startswith(f"{changed.path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3moe", "phi3", "gpt-oss"])
def test_another_architecture_is_refused_by_its_name(architecture: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", architecture=architecture)
    with pytest.raises(
        GGUFError, match=f"'general.architecture' is '{architecture}', expected one of llama, qwen2, qwen3"
    ):
        model_config(open_gguf(path))


def test_a_window_of_another_architecture_is_refused(tmp_path: Path) -> None:
    keys = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 64,
    }
    changes = {f"qwen2.{key}": value for key, value in keys.items()}
    path = write_vocabulary(tmp_path / "a.gguf", changes, "qwen2")
    with pytest.raises(GGUFError, match=r"'qwen2.attention.sliding_window' is 64, expected no such key for this arch"):
        model_config(open_gguf(path))


def test_sampling_defaults_and_end_tokens_are_those_of_generation_config(tmp_path: Path) -> None:
    sampling = {"general__sampling__temp": 0.6, "general__sampling__top_p": 0.95, "general__sampling__top_k": 20}
    assert generation_config(file(tmp_path, **sampling)) == {
        "bos_token_id": 1,
        "eos_token_id": [2, TOKENS.index("<|im_end|>")],
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gguf_bytes((), [tensor("rope_freqs.weight", (8,), 1, 0)], bytes(64)), r"is F16 \[8\], expected F32"),
        (gguf_bytes((), [tensor("rope_freqs.weight", (8,), 0, 0)], bytes(64)), "has other values than numbers above 0"),
    ],
)
def test_wrong_rope_factors_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(GGUFError, match=said):
        rope_factors(open_gguf(tmp_path / "a.gguf"))
    assert rope_factors(file(tmp_path)) == ()
