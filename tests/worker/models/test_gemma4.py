"""Gemma 4: configurations are read as by Transformers, and each variant is computed, or left to Transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.models.choice import choose_model
from quire.worker.models.native.config import ModelConfig, read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.rope import RopeConfig
from quire.worker.models.native.sharding import NotDivisible, Shard
from quire.worker.models.transformers.config import TransformersConfig
from tests.support.checkpoints import COMMON, GEMMA4, make_checkpoint
from tests.worker.models.test_decoder import TOLERANCE, WHOLE, Stepper, draw_prompts, transformers_logits

transformers = pytest.importorskip("transformers")

# The shapes of published models: E2B and E4B with inputs of layers and shared keys, 31B, and 26B-A4B with experts.
SHAPES: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    },
    "E4B": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
    },
    "31B": {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
        "max_position_embeddings": 262_144,
    },
    "26B-A4B": {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
}  # fmt: skip
FAMILIES = ("gemma4", "gemma4-full", "gemma4-moe")


def write(folder: Path, **fields: Any) -> Path:
    """Write a folder whose config.json has these fields, COMMON and those of a small Gemma 4."""
    named = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | GEMMA4 | named | fields))
    return folder


def load(path: Path, name: str = "auto", **options: Any) -> Decoder:
    return Decoder.load(path, kernels.select_ops("cpu", torch.float32, name), torch.float32, "cpu", **options)


def run(model: Decoder, prompts: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits of all positions. Each prompt is computed in one step."""
    return torch.cat(Stepper(model, prompts).run([{s: len(prompt)} for s, prompt in enumerate(prompts)]))


@pytest.mark.parametrize("written_by", ["hub", "transformers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_published_shapes_are_read_as_transformers_reads_them(shape: str, written_by: str, tmp_path: Path) -> None:
    """The Hub has global_head_dim, and Transformers writes per_layer_config in its place."""
    expected = transformers.Gemma4TextConfig(**SHAPES[shape])
    fields = SHAPES[shape] | {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    fields = json.loads(expected.to_json_string(use_diff=False)) | fields if written_by == "transformers" else fields
    names = ("max_position_embeddings", "vocab_size")
    fields = {name: getattr(expected, name) for name in names} | fields
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = read_config(tmp_path)
    assert found.num_layers == expected.num_hidden_layers
    kinds = ["sliding_attention" if window else "full_attention" for window in found.sliding_windows]
    assert kinds == expected.layer_types
    modes = expected.kv_sharing_modes
    for layer in range(found.num_layers):
        own = expected.per_layer_config[layer]
        assert found.head_dim_of(layer) == own.head_dim
        assert found.kv_heads_of(layer) == own.num_key_value_heads
        source = found.kv_source(layer)
        assert (source != layer) == (modes[layer] == "reuse")
        assert source == layer or (kinds[source], modes[source]) == (kinds[layer], "store")
        wide = expected.use_double_wide_mlp and modes[layer] == "reuse"
        assert found.inner_of(layer) == expected.intermediate_size * (2 if wide else 1)
    assert found.rope == RopeConfig("proportional", 1e6, rotated=0.25)
    assert found.local_rope == RopeConfig(theta=1e4)
    assert (found.attention_scale, found.norm_offset, found.final_softcap) == (
        1.0,
        0.0,
        expected.final_logit_softcapping or 0.0,
    )
    assert (found.experts is not None) == expected.enable_moe_block
    assert found.input_width == expected.hidden_size_per_layer_input


def test_the_last_layer_has_full_attention_whatever_the_configuration_says(tmp_path: Path) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    expected = transformers.Gemma4TextConfig(**(COMMON | GEMMA4 | {"layer_types": list(kinds)}))
    assert expected.layer_types[-1] == "full_attention"
    assert read_config(write(tmp_path, layer_types=kinds)).sliding_windows == (0, 0, 8, 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"global_head_dim": 40}, "the head_dim of full attention is 40"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is"),
        ({"per_layer_config": {"1": {"head_dim": 48}}}, "per_layer_config is"),
        ({"per_layer_config": {"full_attention": {"head_dim": 48}}}, "per_layer_config is"),
        ({"per_layer_config": [48]}, "per_layer_config is"),
        ({"per_layer_config": {"1": {"head_dim": 48}, "3": {"head_dim": 32}}}, "per_layer_config is"),
        ({"per_layer_config": {"1": {"rope": 1}, "3": {"rope": 1}}}, "rope is 1"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "full attention has 3 key-value heads"),
        ({"hidden_activation": "relu"}, "hidden_activation is"),
    ],
)
def test_other_variants_are_left_to_transformers(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=reason):
        read_config(write(tmp_path, **fields))
    save_file({"any": torch.zeros(1)}, tmp_path / "model.safetensors")
    if "num_global_key_value_heads" not in fields and "per_layer_config" not in fields:  # Transformers refuses these
        assert isinstance(choose_model(tmp_path), TransformersConfig)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vocab_size_per_layer_input": 10}, "vocab_size_per_layer_input is 10"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts is missing"),
        ({"enable_moe_block": 1}, "enable_moe_block is 1"),
    ],
)
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_config(write(tmp_path, **fields))
    assert not isinstance(caught.value, NotSupported)


@pytest.mark.parametrize(
    ("family", "caches"),
    [
        ("gemma4", [(2, 16), (2, 48)]),
        ("gemma4-full", [(2, 16), (1, 48)] * 2),
    ],
)
def test_layers_have_caches_of_their_own_shapes_or_none(
    family: str, caches: list[tuple[int, int]], tmp_path: Path
) -> None:
    model = load(make_checkpoint(tmp_path, family))
    cache = model.alloc_kv_cache(3, 16, 2)
    assert [(keys.shape[1], keys.shape[3]) for keys, _ in cache.layers] == caches
    assert sum(part.nbytes for layer in cache.layers for part in layer) == 3 * model.kv_bytes_per_block(16)


def test_stored_keys_and_values_of_sharing_layers_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published checkpoints have them; Transformers ignores them, too."""
    path = make_checkpoint(tmp_path, "gemma4")
    tensors = load_file(path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{name}.weight"] = torch.full((48,), 7.0)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    load(path)
    assert "not part of this model" not in caplog.text


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_weights_are_quantised_on_load(family: str, bits: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family, initializer_range=0.1)
    seen: list[tuple[int, int]] = []
    exact = load(path)
    rounded = load(path, bits=bits, progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1]
    assert rounded.weight_bytes < exact.weight_bytes
    reference = load(path, "reference", bits=bits)
    found, expected, plain = (run(model, draw_prompts(1)[1:2]) for model in (rounded, reference, exact))
    # Rounding of activations differs where sums in another order are on both sides of a middle.
    assert float((found - expected).norm()) < 0.3 * float((found - plain).norm())


@pytest.mark.parametrize("family", FAMILIES[:2])  # another rounding may choose another expert
def test_scales_of_an_fp8_cache_change_nothing_else(family: str, tmp_path: Path) -> None:
    """Keys and values have norms: their scales are folded into these, and layers that share a cache have its scales."""
    path = make_checkpoint(tmp_path / "plain", family)
    scaled = tmp_path / "scaled"
    shutil.copytree(path, scaled)
    tensors = load_file(scaled / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(2.0**-6)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(2.0**-4)
    save_file(tensors, scaled / "model.safetensors", {"format": "pt"})
    ops = kernels.ReferenceOps("cpu", torch.float32, torch.float8_e4m3fn)
    # Powers of two change neither the weights nor, within the range of the cache, what it holds.
    one, other = (Decoder.load(at, ops, torch.float32, "cpu") for at in (path, scaled))
    assert other._layers[0].v_norm is not None
    assert float(other._layers[0].v_norm[0]) == 16.0  # the scales are read
    found, expected = (run(model, draw_prompts(1)) for model in (other, one))
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_ranks_have_the_heads_of_each_kind_of_layers(family: str, size: int, tmp_path: Path) -> None:
    config = read_config(make_checkpoint(tmp_path, family))
    shapes = config.tensor_shapes()
    for layer in range(2):
        heads = []
        for rank in range(size):
            shard = Shard(config, rank, size)
            name = f"model.layers.{layer}.self_attn.{{}}_proj.weight"
            rows = {one: torch.arange(shapes[name.format(one)][0])[shard.part(name.format(one))[0]] for one in "qk"}
            assert len(rows["q"]) == shard.local.q_size(layer) == config.q_size(layer) // size
            assert len(rows["k"]) == shard.local.kv_size(layer)
            heads.append(int(rows["k"][0]) // config.head_dim_of(layer))
        kv_heads = config.kv_heads_of(layer)
        assert heads == [rank * kv_heads // size for rank in range(size)]
    inner = "model.layers.3.mlp.down_proj.weight"
    assert Shard(config, 1, size).part(inner)[1] == slice(config.inner_of(3) // size, 2 * config.inner_of(3) // size)


def test_kv_heads_of_full_attention_limit_the_ranks(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_global_key_value_heads": 3}
    config = read_config(write(tmp_path, attention_k_eq_v=True, **fields))
    with pytest.raises(NotDivisible, match=r"4 ranks cannot share 12 heads, 3 and 4 key-value heads.*; 1, 12 can"):
        Shard(config, 0, 4)


def test_adapters_are_refused_with_the_reason(tmp_path: Path) -> None:
    assert (
        "layers of several shapes, which Gemma4ForCausalLM has"
        in load(make_checkpoint(tmp_path, "gemma4")).why_no_adapters
    )


def test_the_text_of_the_wrapper_is_that_of_the_text_model(tmp_path: Path) -> None:
    """A vision-language checkpoint, with inputs of layers and shared keys, as E2B is published."""
    inner = COMMON | GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "tie_word_embeddings": True}
    path = make_checkpoint(tmp_path / "text", "gemma4", tie_word_embeddings=True)
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed["model.vision_tower.encoder.weight"] = torch.zeros(2, 2)
    save_file(renamed, wrapped / "model.safetensors", {"format": "pt"})
    named = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}}
    named |= {"image_token_id": 5, "audio_token_id": 6}
    text = inner | {"model_type": "gemma4_text", "pad_token_id": 9}
    (wrapped / "config.json").write_text(json.dumps(named | {"text_config": text, "dtype": "float32"}))
    config = choose_model(wrapped)
    assert isinstance(config, ModelConfig)
    prompts = draw_prompts(1)
    prompts[0][3:5] = torch.tensor([5, 6])  # placeholders of an image and of audio are computed as padding
    found = Stepper(load(wrapped), prompts).run(WHOLE)
    prompts[0][3:5] = 9
    for one, other in zip(found, transformers_logits(path, prompts, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


ROPES = {
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "factor": 2.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma4-full", {"global_head_dim": 16, "num_global_key_value_heads": None}),  # one width, no inputs
        ("gemma4-full", {"attention_bias": True}),
        ("gemma4", {"rope_parameters": ROPES, "initializer_range": 0.2}),
    ],
)
def test_variants_give_the_logits_of_transformers(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family, **fields)
    prompts = draw_prompts(1)
    found = Stepper(load(path), prompts).run(WHOLE)
    for one, other in zip(found, transformers_logits(path, prompts, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def test_wrong_factors_of_rope_are_refused(tmp_path: Path) -> None:
    wrong = ROPES | {"full_attention": ROPES["full_attention"] | {"partial_rotary_factor": 2}}
    with pytest.raises(CheckpointError, match="partial_rotary_factor is 2"):
        read_config(write(tmp_path, rope_parameters=wrong))
