"""Angles of RoPE, and contexts beyond the original length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.shared.model.fields import Fields
from quire.shared.process.errors import NotSupported
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.offline import generate
from quire.worker.models.native.rope import RopeConfig, cos_sin_table, inverse_frequencies, parse_rope
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import assert_greedy, load, load_reference, make_engine, prompts, refusal
from tests.support.transformers_checkpoints import LLAMA_LIKE, change, make_other

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def parsed(**fields: Any) -> RopeConfig:
    return parse_rope(Fields(fields, "config.json"), 8192)


def test_both_forms_of_the_configuration_are_read() -> None:
    assert parsed() == RopeConfig()
    assert parsed(rope_theta=5.0) == parsed(rope_parameters={"rope_theta": 5.0}) == RopeConfig(theta=5.0)
    linear = RopeConfig("linear", 10_000.0, 2.0)
    assert parsed(rope_scaling={"type": "linear", "factor": 2.0}) == linear
    assert parsed(rope_parameters={"rope_type": "linear", "factor": 2.0}) == linear


def test_the_original_length_of_llama3_is_that_of_the_model_unless_it_is_given() -> None:
    original = {"original_max_position_embeddings": 4096}
    assert parsed(rope_scaling=LLAMA3).original_max_position_embeddings == 8192, "that of the model"
    assert parsed(rope_scaling=LLAMA3 | original).original_max_position_embeddings == 4096


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0}], ids=["", "betas"]
)
def test_yarn_has_the_frequencies_of_transformers_bit_for_bit(truncate: bool, extra: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    rope |= {"truncate": truncate} | extra
    config = transformers.GptOssConfig(head_dim=64, rope_parameters=dict(rope))
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    found = parse_rope(Fields({"rope_parameters": rope}, "here"), 131072)
    assert torch.equal(inverse_frequencies(found, 64), expected)
    table = cos_sin_table(found, 64, 9)
    angles = torch.arange(9.0)[:, None] * expected
    assert torch.equal(table, torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1))


@pytest.mark.parametrize("changes", [{"mscale": 0.7}, {"llama_4_scaling_beta": 0.1}, {"factor": None}])
def test_yarn_with_fields_of_other_models_is_left_to_transformers(changes: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64} | changes
    with pytest.raises(NotSupported, match=f"{next(iter(changes))} is "):
        parsed(rope_parameters=rope)


def test_yarn_stretches_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert parsed(rope_scaling=yarn).longest_context(8192) == 32768, "as model cards add it"
    trained = parsed(rope_scaling=yarn | {"original_max_position_embeddings": 2048})
    assert trained.longest_context(8192) == trained.longest_context(2048) == 8192
    assert RopeConfig("linear", factor=4.0).longest_context(8192) == 8192
    with pytest.raises(NotSupported, match=r"supported: default, linear, llama3$"):
        parse_rope(Fields({"rope_scaling": yarn}, "here"), 64, yarn=False)


GREEDY = SamplingParams(max_tokens=12, temperature=0.0)

ORIGINAL, LONGEST = 128, 256


def make(folder: Path) -> Path:
    model_type, fields = ARCHITECTURES["phi3-longrope"]
    return make_other(folder / "phi3", model_type, **fields)


def long_text() -> tuple[int, ...]:
    return tuple((7 * at * at + 3) % VOCAB_SIZE for at in range(LONGEST - GREEDY.max_tokens))


@pytest.mark.slow
def test_without_a_length_the_context_is_the_original_with_short_factors(tmp_path: Path) -> None:
    model = load(make(tmp_path))
    assert model.max_model_len == ORIGINAL
    [rope] = [module for module in model._model.modules() if hasattr(module, "rope_type")]
    torch.testing.assert_close(rope.inv_freq, rope.original_inv_freq)


@pytest.mark.slow
def test_texts_beyond_the_original_length_equal_transformers(tmp_path: Path) -> None:
    path = make(tmp_path)
    model = load(path, LONGEST)
    assert model.max_model_len == LONGEST
    # Transformers, too, takes the long factors from the start for a text longer than the original length.
    answer = generate(make_engine(model, num_blocks=200), [long_text()], GREEDY)[0]
    assert_greedy(load_reference(path), [long_text()], answer)


@pytest.mark.slow
def test_short_texts_have_the_long_factors_too(tmp_path: Path) -> None:
    """So a text has the same keys before and after it passes the original length."""
    path = make(tmp_path)
    model = load(path, ORIGINAL + 1)
    answers = [choices[0] for choices in generate(make_engine(model, num_blocks=200), prompts()[:12], GREEDY)]
    with pytest.raises(AssertionError):
        assert_greedy(load_reference(path), prompts()[:12], answers)
    values: dict[str, Any] = json.loads((path / "config.json").read_text())
    rope = values["rope_parameters"]
    change(path, rope_parameters=rope | {"short_factor": rope["long_factor"]})
    assert_greedy(load_reference(path), prompts()[:12], answers)


@pytest.mark.slow
def test_contexts_beyond_the_longest_are_refused(tmp_path: Path) -> None:
    said = refusal(make(tmp_path), LONGEST + 1)
    assert "--max-model-len is 257, but the longest context of the model is 256" in said
    assert "give --max-model-len from 1 to 256, or 0 for 128" in said


@pytest.mark.slow
def test_scales_that_depend_on_the_step_are_refused_beyond_the_original_length(tmp_path: Path) -> None:
    """PhiMoE has a scale for short texts and another for long ones."""
    _, fields = ARCHITECTURES["phimoe"]
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope |= {"original_max_position_embeddings": ORIGINAL, "short_mscale": 1.0, "long_mscale": 1.5}
    path = make_other(tmp_path / "phimoe", "phimoe", **(LLAMA_LIKE | fields | {"rope_parameters": rope}))
    assert load(path).max_model_len == ORIGINAL
    said = refusal(path, LONGEST)
    assert "chooses the scale of RoPE by the length of each step" in said
    assert "give --max-model-len 128 or less" in said


@pytest.mark.slow
def test_yarn_equals_transformers_at_its_full_length(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
    path = make_other(tmp_path / "llama", "llama", **(LLAMA_LIKE | {"rope_parameters": yarn}))
    model = load(path)
    assert model.max_model_len == LONGEST
    answer = generate(make_engine(model, num_blocks=200), [long_text()], GREEDY)[0]
    assert_greedy(load_reference(path), [long_text()], answer)
