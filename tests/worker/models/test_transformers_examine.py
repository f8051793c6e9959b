"""A model is examined when it is loaded: each attention call with its module, and what depends on a past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.worker.models.transformers_attention import UnsupportedAttention
from quire.worker.models.transformers_config import read_transformers_config
from quire.worker.models.transformers_examine import apart, examine
from quire.worker.models.transformers_trial import texts
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.transformers_checkpoints import make_kind, make_other

pytestmark = pytest.mark.usefixtures("one_thread")


def examined(path: Path, max_model_len: int = 64) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    text = texts(VOCAB_SIZE, max_model_len)[0]
    return model, examine(model, read_transformers_config(path), text, torch.float32, max_model_len)


def test_each_call_is_recorded_with_its_module(tmp_path: Path) -> None:
    model, (shapes, states, modules) = examined(make_kind(tmp_path / "gemma3", "gemma3"))
    assert [one.sliding_window for one in shapes] == [8, 0, 8]
    assert modules == [layer.self_attn for layer in model.model.layers]
    assert states is None


def test_states_of_other_layers_are_found(tmp_path: Path) -> None:
    model_type, fields = ARCHITECTURES["lfm2"]
    _, (shapes, states, _) = examined(make_other(tmp_path / "lfm2", model_type, **fields))
    assert len(shapes) == 1
    assert states is not None


def test_positions_that_are_counted_in_a_cache_are_refused(tmp_path: Path) -> None:
    model_type, fields = ARCHITECTURES["llama4_text-tuned"]
    with pytest.raises(UnsupportedAttention, match="it takes positions from the cache of Transformers"):
        examined(make_other(tmp_path / "llama4", model_type, **fields))


def test_the_distance_of_rows_is_relative_and_that_of_the_farthest_row() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    assert apart(expected, expected) == 0
    assert apart(torch.tensor([[3.0, 4.5], [0.0, 12.0]]), expected) == pytest.approx(0.2)
