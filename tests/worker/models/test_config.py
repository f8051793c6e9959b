"""Configurations of checkpoints: supported values, fields, names of layers, and refusals in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.layer_names import MAX_PATTERNS, LayerNames, PatternError
from quire.worker.models.native.config import read_config

COMMON = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

CLASSES |= {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
CLASSES |= {"ministral": "Ministral", "seed_oss": "SeedOss", "iquestcoder": "IQuestCoder"}

# Of several kinds of layers.
OTHER_CLASSES = {"gpt_oss": "GptOss", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "cwm": "Cwm"}


def write(folder: Path, family: str, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a folder whose config.json has COMMON with the changes."""
    config = (
        COMMON | {"model_type": family, "architectures": [f"{(CLASSES | OTHER_CLASSES)[family]}ForCausalLM"]} | changes
    )
    (folder / "config.json").write_text(json.dumps({name: config[name] for name in config if name not in remove}))
    return folder


def refusal(folder: Path, *parts: str) -> None:
    """Check that reading fails with one line that has each of the parts, and a remedy after the last semicolon."""
    with pytest.raises(CheckpointError) as caught:
        read_config(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    assert str(folder) in message
    for part in parts:
        assert part in message


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    refusal(tmp_path, "config.json: this file is missing")


@pytest.mark.parametrize("text", ["{", "", "\xff", "[" * 100_000])
def test_broken_json_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    refusal(tmp_path, "config.json: this file is not valid JSON")


def test_json_that_is_not_an_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    refusal(tmp_path, "config.json: this file holds a list and not a JSON object")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, 'architectures is ["GPT2LMHeadModel"]; supported: one of Ll'),
        ("llama", {"architectures": None, "model_type": "gpt2"}, 'model_type is "gpt2"; supported: LlamaForCausalLM'),
        ("llama", {"architectures": None, "model_type": None}, "architectures is null; supported: LlamaForCausalLM"),
        ("llama", {"model_type": "qwen2"}, 'model_type is "qwen2"; supported: llama, as architectures'),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu"; supported: silu'),
        ("llama", {"quantization_config": {"bits": 4}}, "quant_method is missing; supported: auto-round, awq"),
        ("qwen2", {"compression_config": {}}, "compression_config: quant_method is missing; supported: auto-round"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; supported: no such field"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling is 8.0; supported: no such field or 1"),
        ("llama", {"is_causal": False}, "is_causal is false; supported: no such field or true"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1.0"),
        ("llama", {"rope_parameters": {"rope_type": "su", "factor": 2.0}}, 'rope_type is "su"; supported: default, l'),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling: type is "dynamic"; supported'),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing; supported: a number above 0"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "one set of RoPE parameters for all layers"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": 3}, "rope_parameters is 3; supported: a JSON object"),
        ("llama", {"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1; supported: a number above 0"),
        ("llama", {"hidden_size": "64"}, 'hidden_size is "64"; supported: an integer from 1 to'),
        ("llama", {"hidden_size": None}, "hidden_size is null; supported: an integer"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; supported"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; supported"),
        ("llama", {"num_attention_heads": True}, "num_attention_heads is true; supported"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; supported: a divisor of"),
        ("llama", {"head_dim": 20}, "head_dim is 20; supported: a multiple of 16"),
        ("llama", {"head_dim": None, "num_attention_heads": 6}, "num_attention_heads is 6; supported: a divisor of"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; supported: a number above 0"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; supported: true or false"),
        ("llama", {"dtype": "float8_e4m3fn"}, 'dtype is "float8_e4m3fn"; supported: float32'),
        ("mistral", {"attention_bias": True}, "attention_bias is true; supported: false for mistral"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias is true; supported: false for qwen2"),
        ("mistral", {"sliding_window": -4}, "sliding_window is -4; supported"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "the same kind for all layers"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "the same kind for all layers, as sliding_window says"),
        ("qwen2", {"layer_types": ["full_attention"]}, 'layer_types is ["full_attention"]; supported'),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "only with use_sliding_window"),
    ],
)
def test_a_configuration_that_would_change_the_numbers_is_refused(tmp_path, family, changes, message):
    refusal(write(tmp_path, family, **changes), "config.json", message)


def test_all_that_is_left_out_has_the_default_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    left_out = ("num_key_value_heads", "architectures")
    for family, name in CLASSES.items():
        config = read_config(write(tmp_path, family, remove=left_out, num_attention_heads=32, hidden_size=512))
        theirs = getattr(transformers, f"{name}Config").from_pretrained(tmp_path)
        assert config.architecture == f"{name}ForCausalLM"
        assert config.num_kv_heads == theirs.num_key_value_heads
        assert config.head_dim == (getattr(theirs, "head_dim", None) or 16)
        assert config.rope.theta == theirs.rope_parameters["rope_theta"]
        assert config.rms_norm_eps == theirs.rms_norm_eps
        assert config.tie_word_embeddings == theirs.tie_word_embeddings
        assert config.bos_token_id == theirs.bos_token_id
        assert config.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
        assert config.sliding_windows == (getattr(theirs, "sliding_window", None) or 0,) * 2
        assert config.dtype is None


def test_the_dtype_has_two_names_and_two_forms(tmp_path):
    for changes in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"torch_dtype": "torch.bfloat16"}):
        assert read_config(write(tmp_path, "llama", **changes)).dtype == "bfloat16"


def test_special_tokens_are_those_of_the_generation_configuration_if_it_has_any(tmp_path):
    def eos(in_generation: Any, **changes: Any) -> tuple[int, ...]:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
        return read_config(write(tmp_path, "llama", **changes)).eos_token_ids

    assert eos({"eos_token_id": [3, 4, 5]}, eos_token_id=[1, 2]) == (3, 4, 5)
    assert eos({"bos_token_id": 9}, eos_token_id=[1, 2]) == (1, 2)
    assert eos({"eos_token_id": 0}, eos_token_id=7) == (0,)
    assert eos({}, eos_token_id=None) == ()
    assert eos({}) == (2,)  # the default of Llama
    assert eos({"eos_token_id": [3, 100, 99]}) == (3, 99)  # without the ids outside of the vocabulary
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["2"]}))
    refusal(tmp_path, 'generation_config.json: eos_token_id is ["2"]; supported: a token id or a list')


WINDOWED = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {"sliding_window": 8}, (0, 0)),  # not a field of that architecture
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (8, 8)),
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("mistral", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, (0, 0)),
        ("qwen2", {"sliding_window": 8}, (0, 0)),
        ("qwen2", {**WINDOWED, "max_window_layers": 1}, (0, 8)),
        ("qwen3", {**WINDOWED, "max_window_layers": 0}, (8, 8)),
        ("qwen3", WINDOWED, (0, 0)),
        ("ministral", {"sliding_window": 8}, (8, 8)),
        ("ministral", {"sliding_window": None}, (0, 0)),
        ("ministral", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, (8, 0)),
        ("qwen2", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}, (8, 0)),
    ],
)
def test_each_layer_has_its_own_window(tmp_path, family, changes, windows):
    assert read_config(write(tmp_path, family, **changes)).sliding_windows == windows


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def test_absent_fields_of_gemma_and_gpt_oss_have_the_defaults_of_transformers(tmp_path):
    found = read_config(write(tmp_path, "gemma2", num_hidden_layers=3))
    assert (found.softcap, found.final_softcap, found.attention_scale, found.head_dim) == (50.0, 30.0, 1 / 16, 256)
    assert (found.sliding_windows, found.tie_word_embeddings, found.norm_offset) == ((4096, 0, 4096), True, 1.0)
    assert (found.embedding_scale, found.post_norms, found.local_rope) == (8.0, True, None)
    uncapped = read_config(write(tmp_path, "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (uncapped.softcap, uncapped.final_softcap) == (0.0, 0.0)
    found = read_config(write(tmp_path, "gemma3_text", num_hidden_layers=7, sliding_window=512))
    assert found.sliding_windows == (512,) * 5 + (0, 512)
    assert (found.softcap, found.final_softcap, found.rope.theta, found.local_rope.theta) == (0.0, 0.0, 1e6, 1e4)
    found = read_config(write(tmp_path, "gpt_oss", rope_scaling=YARN))
    assert (found.sliding_windows, found.sinks, found.qkv_bias, found.o_bias) == ((128, 0), True, True, True)
    assert (found.rope.theta, found.rope.factor, found.head_dim) == (150_000.0, 32.0, 64)
    assert (found.experts.routing.num_experts, found.experts.routing.top_k) == (128, 4)


def test_rotations_of_gemma_3_are_read_in_both_forms(tmp_path):
    old = {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    first, second = (read_config(write(tmp_path, "gemma3_text", **one)) for one in (old, {"rope_parameters": both}))
    assert first == second
    assert (first.rope.rope_type, first.rope.factor, first.local_rope.theta) == ("linear", 8.0, 300.0)
    half = {"full_attention": both["full_attention"]}
    refusal(write(tmp_path, "gemma3_text", rope_parameters=half), "rope_parameters", "sliding_attention")


def test_windows_of_layer_types_need_a_window(tmp_path):
    refusal(write(tmp_path, "gemma2", sliding_window=None), "sliding_window is null")
    refusal(write(tmp_path, "gemma2", layer_types=["other"] * 2), "layer_types")
    full = read_config(write(tmp_path, "gemma2", sliding_window=None, layer_types=["full_attention"] * 2))
    assert full.sliding_windows == (0, 0)


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("patterns", "closeness"),
    [
        ([UP, "Linear"], 3),
        (["re:.*up_proj$", "Linear"], 2),
        (["Linear"], 1),
        (["re:.*lm_head", "model.layers.1.mlp"], 0),
        (["re:mlp"], 0),
        (["re:model\\.layers\\.(0|1)\\.mlp.*"], 2),
        ([], 0),
    ],
)
def test_the_closest_pattern_counts(patterns, closeness):
    assert LayerNames(patterns).match(UP) == closeness


@pytest.mark.parametrize(
    "pattern", ["re:(a*)*b", "re:(a|b)+c", "re:" + "a*" * 7, "re:(", "re:(a)\\1", "re:" + "x" * 600, "re:((a){2,})+"]
)
def test_an_expression_that_could_take_long_is_refused(pattern):
    with pytest.raises(PatternError, match="has the expression"):
        LayerNames([pattern])


def test_too_many_patterns_are_refused():
    with pytest.raises(PatternError, match="entries"):
        LayerNames(["a"] * (MAX_PATTERNS + 1))


def test_the_worst_expression_that_is_allowed_is_fast():
    names = LayerNames(["re:" + ".*" * 6 + "X"])
    started = time.process_time()
    assert names.match("model.layers.100.self_attn.q_proj") == 0
    assert time.process_time() - started < 5
