"""Whole layers are replaced if the trial gives the same outputs of every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quire.worker.models import transformers_backend
from quire.worker.models import transformers_trial as trial
from quire.worker.models.transformers_fused_layer import FusedLayer, fuse_layers
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import load
from tests.support.transformers_checkpoints import LLAMA_LIKE, make_kind, make_other

TEXTS = trial.texts(VOCAB_SIZE, 256)


@pytest.fixture(autouse=True)
def without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep single layers, which a stack would replace."""
    monkeypatch.setattr(transformers_backend, "fuse_stack", lambda *_: False)


def fused_layers(model: transformers_backend.TransformersModel) -> list[FusedLayer]:
    found = (vars(layer).get("forward") for layer in model._model.model.layers)
    return [one for one in found if isinstance(one, FusedLayer)]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "ministral"])
def test_whole_layers_give_the_logits_of_single_modules(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_other(tmp_path / model_type, model_type, **(LLAMA_LIKE | {"head_dim": 16}))
    model = load(path)
    assert len(fused_layers(model)) == 3
    monkeypatch.setattr(transformers_backend, "fuse_layers", lambda *_: 0)
    plain = load(path)
    assert fused_layers(plain) == []
    found, expected = (trial.over_pages(one, TEXTS) for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_computes_something_more_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaDecoderLayer.forward

    def scaled(self: Any, *args: Any, **named: Any) -> Any:
        return forward(self, *args, **named) * 1.01

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    model = load(make_kind(tmp_path / "llama", "llama-yarn"))
    assert fused_layers(model) == []
    assert "forward" not in vars(model._model.model.layers[0])


def test_layers_that_fail_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_kind(tmp_path / "llama", "llama-yarn"))
    for layer in model._model.model.layers:
        del layer.forward
    monkeypatch.setattr(FusedLayer, "__call__", lambda *_, **__: 1 / 0)
    args = (model._model, model.ops, model._fused.rotations, lambda: trial.over_pages(model, TEXTS))
    assert fuse_layers(*args) == 0
    assert fused_layers(model) == []
