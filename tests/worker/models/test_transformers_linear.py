"""Linear layers that the kernels compute, and layers that are left to torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire import kernels
from quire.worker.models import transformers_trial
from quire.worker.models.transformers_linear import LinearUses, PackedLinearModule, pack
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import load
from tests.support.transformers_checkpoints import (
    make_kind,
)


def test_a_layer_in_two_places_is_packed_once_and_one_of_another_type_is_left() -> None:
    shared, exact, head = nn.Linear(32, 32), nn.Linear(32, 4).double(), nn.Linear(32, 8, bias=False)
    model: Any = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, exact), "head": head})
    model.get_output_embeddings = lambda: head
    x = torch.randn(3, 32).bfloat16()
    shared.bfloat16(), head.bfloat16()
    expected = shared(x)
    pack(model, kernels.select_ops("cpu", torch.bfloat16, "reference"))
    assert isinstance(model["a"][0], PackedLinearModule)
    assert model["a"][0] is model["b"][0]
    assert model["b"][1] is exact
    torch.testing.assert_close(model["a"](x), expected, rtol=0.02, atol=0.02)
    assert model["head"](x).dtype is torch.float32


class Reader(nn.Module):
    """Uses each of its layers in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.called, self.asked, self.unused, self.both, self.bias_read = (nn.Linear(32, 32) for _ in range(5))
        self.read = nn.Linear(32, 32, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.called(self.embedding(ids))
        x = self.asked(x.to(self.asked.weight.dtype).to(self.asked.weight.device))
        x = x @ self.read.weight.type(torch.float32).T
        x = self.both(x) * torch.cat([self.both.weight, self.both.weight]).mean()
        x = self.bias_read(x) + self.bias_read.bias
        return self.head(self.experts[1](x))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_layer_whose_weight_is_read_is_left_to_torch() -> None:
    model, ids = Reader(), torch.arange(8)
    before = dict(model.named_parameters(remove_duplicate=False))
    expected = model(ids)
    with torch.inference_mode(), LinearUses(model) as uses:
        torch.testing.assert_close(model(ids), expected)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    model.requires_grad_(False)
    pack(model, kernels.select_ops("cpu", torch.float32, "reference"), None, uses.unpackable())
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinearModule)}
    assert packed == {"called", "asked", "experts.0", "experts.1", "experts.2", "head"}
    assert set(uses.left_to_torch(model)) == {model.read, model.both, model.bias_read}
    torch.testing.assert_close(model(ids), expected)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_model_with_such_a_layer_does_not_promise_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    path = make_kind(tmp_path / "gpt2", "gpt2")
    assert load(path).is_row_invariant
    expected = transformers_trial.over_pages(load(path), transformers_trial.texts(VOCAB_SIZE, 256))

    def written_out(self: Any, hidden: Any) -> Any:
        return self.c_proj(self.act(hidden @ self.c_fc.weight + self.c_fc.bias))

    monkeypatch.setattr(GPT2MLP, "forward", written_out)
    model = load(path)
    assert not model.is_row_invariant
    assert isinstance(model._model.transformer.h[0].mlp.c_proj, PackedLinearModule)
    found = transformers_trial.over_pages(model, transformers_trial.texts(VOCAB_SIZE, 256))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
