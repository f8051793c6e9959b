"""Models that Transformers computes give their hidden states, or say that they have none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quire.worker.models.transformers_hidden import HiddenStates, body_of
from tests.support.parity import load
from tests.support.transformers_checkpoints import make_kind
from tests.worker.engine.test_pooling import by_engine, by_transformers, vectors


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "gemma3", "cohere2", "qwen3-moe"])
def test_embeddings_are_those_of_transformers(kind: str, pooling: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path, kind)
    model = load(path)
    assert model.hidden_size > 0
    found = vectors(by_engine(model, pooling, budget=50))
    for one, other in zip(found, by_transformers(path, pooling, torch.float32), strict=True):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()


class Body(nn.Module):
    def forward(self, output: Any) -> Any:
        return output


class Model(nn.Module):
    def __init__(self, base: nn.Module | None, decoder: nn.Module | None = None) -> None:
        super().__init__()
        self._base, self._decoder = base, decoder

    @property
    def base_model(self) -> nn.Module:
        return self._base or self

    def get_decoder(self) -> nn.Module:
        return self._decoder or self


def test_the_body_is_the_part_below_the_head() -> None:
    assert body_of(Model(None)) is None
    assert body_of(nn.Identity()) is None
    base, decoder = Body(), Body()
    assert body_of(Model(base)) is base
    assert body_of(Model(base, decoder)) is decoder


@pytest.mark.parametrize("output", [(torch.ones(1, 3, 2),), SimpleNamespace(last_hidden_state=torch.ones(3, 2)), None])
def test_another_output_is_refused(output: Any) -> None:
    body = Body()
    with HiddenStates(body) as hidden:
        body(output)
    with pytest.raises(RuntimeError, match="no hidden states"):
        hidden.rows(torch.tensor([0]))


def test_the_hook_is_removed() -> None:
    body = Body()
    with HiddenStates(body) as hidden:
        body(SimpleNamespace(last_hidden_state=torch.arange(6.0).view(1, 3, 2)))
    body(None)
    assert hidden.rows(torch.tensor([2, 0])).tolist() == [[4.0, 5.0], [0.0, 1.0]]
