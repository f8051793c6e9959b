"""Models with longrope have the long factors for all texts, if the worker is asked for contexts beyond the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.shared.messages import SamplingParams
from quire.worker.engine.offline import generate
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import assert_greedy, load, load_reference, make_engine, prompts, refusal
from tests.support.transformers_checkpoints import LLAMA_LIKE, change, make_other

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
ORIGINAL, LONGEST = 128, 256


def make(folder: Path) -> Path:
    model_type, fields = ARCHITECTURES["phi3-longrope"]
    return make_other(folder / "phi3", model_type, **fields)


def long_text() -> tuple[int, ...]:
    return tuple((7 * at * at + 3) % VOCAB_SIZE for at in range(LONGEST - GREEDY.max_tokens))


def test_without_a_length_the_context_is_the_original_with_short_factors(tmp_path: Path) -> None:
    model = load(make(tmp_path))
    assert model.max_model_len == ORIGINAL
    [rope] = [module for module in model._model.modules() if hasattr(module, "rope_type")]
    torch.testing.assert_close(rope.inv_freq, rope.original_inv_freq)


def test_texts_beyond_the_original_length_equal_transformers(tmp_path: Path) -> None:
    path = make(tmp_path)
    model = load(path, LONGEST)
    assert model.max_model_len == LONGEST
    # Transformers, too, takes the long factors from the start for a text longer than the original length.
    answer = generate(make_engine(model, num_blocks=200), [long_text()], GREEDY)[0]
    assert_greedy(load_reference(path), [long_text()], answer)


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


def test_contexts_beyond_the_longest_are_refused(tmp_path: Path) -> None:
    said = refusal(make(tmp_path), LONGEST + 1)
    assert "--max-model-len is 257, but the longest context of the model is 256" in said
    assert "give --max-model-len from 1 to 256, or 0 for 128" in said


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


def test_yarn_equals_transformers_at_its_full_length(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
    path = make_other(tmp_path / "llama", "llama", **(LLAMA_LIKE | {"rope_parameters": yarn}))
    model = load(path)
    assert model.max_model_len == LONGEST
    answer = generate(make_engine(model, num_blocks=200), [long_text()], GREEDY)[0]
    assert_greedy(load_reference(path), [long_text()], answer)
