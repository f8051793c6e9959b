"""The text of vision-language models by Quire's own decoder: the tokens are those of Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.shared.model.folder import WEIGHTS
from quire.shared.process.errors import NotSupported
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.choice import choose_model
from quire.worker.models.files.tensor_names import text_tensor_name
from quire.worker.models.native.config import ModelConfig, read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.rope import RopeConfig
from quire.worker.models.transformers.config import TransformersConfig
from tests.support.parity import GREEDY, SMALL, prompts
from tests.support.vision_checkpoints import make_vision

LIMITS: dict[str, Any] = SMALL | {"max_model_len": 256, "prefix_caching": True}


def answers(path: Path) -> list[list[int]]:
    config = choose_model(path)
    assert isinstance(config, ModelConfig)
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    engine = Engine(model, EngineLimits(**LIMITS), config.eos_token_ids, None)
    engine.checks_itself = True
    found = [choices[0] for choices in generate(engine, prompts(), GREEDY)]
    assert engine.groups.num_preemptions > 0
    hits = engine.scheduler.blocks.counters.prefix_hits
    assert [choices[0] for choices in generate(engine, prompts()[-2:] * 2, GREEDY)] == found[-2:] * 2
    assert engine.scheduler.blocks.counters.prefix_hits > hits
    return found


def test_a_configuration_without_a_part_for_text_is_read_as_on_the_hub(tmp_path: Path) -> None:
    """Qwen2.5-VL on the Hugging Face Hub has the fields of its text model at the top, and RoPE of the type mrope."""
    path = make_vision(tmp_path / "qwen2_5_vl", "qwen2_5_vl")
    found = answers(path)
    values = json.loads((path / "config.json").read_text())
    inner = values.pop("text_config")
    rope = inner.pop("rope_parameters")
    inner |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    names = ("architectures", "model_type", "vision_config", "tie_word_embeddings")
    (path / "config.json").write_text(json.dumps(inner | {name: values[name] for name in names if name in values}))
    assert answers(path) == found


def test_gemma_3_as_published_leaves_sizes_to_the_defaults_of_transformers(tmp_path: Path) -> None:
    """The text_config of gemma-3-4b-it has six fields. The others are those of Gemma3TextConfig."""
    transformers = pytest.importorskip("transformers")
    inner = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"text_config": inner, "vision_config": {}}))
    expected = transformers.Gemma3TextConfig(**inner)
    config = read_config(tmp_path)
    for name in ("hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size", "head_dim"):
        assert getattr(config, name) == getattr(expected, name), name
    assert (config.num_heads, config.num_kv_heads, config.num_layers) == (8, 4, 34)
    kinds = ["sliding_attention" if window else "full_attention" for window in config.sliding_windows]
    assert kinds == expected.layer_types
    assert (config.query_scalar, max(config.sliding_windows)) == (expected.query_pre_attn_scalar, 1024)
    full, local = expected.rope_parameters["full_attention"], expected.rope_parameters["sliding_attention"]
    assert (config.rope.rope_type, config.rope.factor, config.rope.theta) == ("linear", 8.0, full["rope_theta"])
    assert config.local_rope == RopeConfig(theta=local["rope_theta"])
    assert config.eos_token_ids == (1, 106)
    # End tokens of the text model do not replace those of the whole model.
    for eos in (2, None):
        (tmp_path / "config.json").write_text(json.dumps(values | {"text_config": {**inner, "eos_token_id": eos}}))
        assert read_config(tmp_path).eos_token_ids == (1, 106)


def test_all_prefixes_of_tensors_are_found(tmp_path: Path) -> None:
    path = make_vision(tmp_path / "llava", "llava")
    found = answers(path)
    tensors = load_file(path / WEIGHTS)
    for prefix in ("model.language_model.", "language_model.model.", "model.text_model."):
        plain = {text_tensor_name(name): tensor for name, tensor in tensors.items()}
        body = {name: one for name, one in plain.items() if name.startswith("model.") and "vision" not in name}
        others = {name: one for name, one in plain.items() if name not in body}
        renamed = {prefix + name.removeprefix("model."): one for name, one in body.items()}
        save_file({name: one.clone() for name, one in (others | renamed).items()}, path / WEIGHTS, {"format": "pt"})
        assert answers(path) == found


def test_a_head_that_is_not_in_the_checkpoint_is_the_embedding(tmp_path: Path) -> None:
    path = make_vision(tmp_path / "mistral3", "mistral3")
    found = answers(path)
    assert "language_model.lm_head.weight" not in load_file(path / WEIGHTS)
    values = json.loads((path / "config.json").read_text())
    del values["tie_word_embeddings"], values["text_config"]["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(values))
    assert read_config(path).tie_word_embeddings
    assert answers(path) == found


@pytest.mark.parametrize("field", ["num_key_value_heads", "hidden_size", "rope_parameters"])
def test_a_text_model_that_leaves_fields_to_defaults_goes_to_transformers(field: str, tmp_path: Path) -> None:
    """Configurations on the Hugging Face Hub, such as that of LLaVA 1.5, leave out fields with default values."""
    path = make_vision(tmp_path / "llava", "llava")
    values = json.loads((path / "config.json").read_text())
    del values["text_config"][field]
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(NotSupported, match="is missing; supported: a number, as its default depends on the model"):
        choose_model(path, "quire")
    assert isinstance(choose_model(path), TransformersConfig)


def test_a_text_model_of_another_family_goes_to_transformers(tmp_path: Path) -> None:
    path = make_vision(tmp_path / "llava", "llava", model_type="gemma", head_dim=16)
    with pytest.raises(
        NotSupported, match=r'model_type is "gemma"; supported: one of gemma3_text, gemma4_text, .* in LlavaForCond'
    ):
        choose_model(path, "quire")
    assert isinstance(choose_model(path), TransformersConfig)
