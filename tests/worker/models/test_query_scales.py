"""Queries are scaled by the position of their token, as Llama 4 scales them in a context of any length."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.worker.models.query_scales import LogQueryScale, scaled, take_query_scales
from quire.worker.models.transformers_trial import by_transformers
from tests.support.architectures import ARCHITECTURES
from tests.support.parity import load
from tests.support.transformers_checkpoints import make_other

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_factor_grows_with_each_period() -> None:
    factors = LogQueryScale(0.5, 8.0)(torch.tensor([0, 6, 7, 14, 15, 1_000_000]))
    expected = 1 + 0.5 * torch.log(1 + torch.tensor([0.0, 0, 1, 1, 2, 125_000]))
    torch.testing.assert_close(factors, expected)


def test_each_query_gets_the_factor_of_its_position() -> None:
    q = torch.ones(1, 2, 3, 4, dtype=torch.bfloat16)
    module = SimpleNamespace(query_scale=LogQueryScale(1.0, 1.0))
    found = scaled(module, q, torch.tensor([3, 0, 100], dtype=torch.int32))
    assert found.dtype is torch.bfloat16
    factors = 1 + torch.log(torch.tensor([5.0, 2.0, 102.0]))
    torch.testing.assert_close(found[0, 1, :, 2], factors.bfloat16())
    assert scaled(SimpleNamespace(), q, torch.arange(3)) is q


def test_only_layers_without_rotation_leave_their_factor_to_the_attention(tmp_path: Path) -> None:
    model_type, fields = ARCHITECTURES["llama4_text-tuned"]
    path = make_other(tmp_path / "llama4", model_type, **fields)
    layers = load(path)._model.model.layers
    assert [hasattr(layer.self_attn, "query_scale") for layer in layers] == [False, True, False]
    assert not layers[1].self_attn.attn_temperature_tuning


def test_the_trial_sees_the_factors_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a period of 8 tokens the factors matter in the texts of the trial: other factors are refused."""
    from transformers import AutoModelForCausalLM

    from quire.worker.models.errors import NotSupported

    model_type, fields = ARCHITECTURES["llama4_text-tuned"]
    path = make_other(tmp_path / "llama4", model_type, **fields)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    text = torch.arange(3, 14, dtype=torch.int32)
    with_factors = by_transformers(model, [text])
    take_query_scales(model)
    assert not torch.allclose(by_transformers(model, [text]), with_factors)
    monkeypatch.setattr(LogQueryScale, "__call__", lambda self, positions: torch.ones(len(positions)))
    with pytest.raises(NotSupported, match="gives other logits with paged attention"):
        load(path)
