"""Linear layers with the same input are one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.worker.models.transformers_fused_linear import JoinedLinearModule, JoinedProduct, find_joins
from quire.worker.models.transformers_linear import LinearUses
from quire.worker.models.transformers_parts import Parts

OPS = kernels.select_ops("cpu", torch.float32)


class Projections(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 24, bias), nn.Linear(16, 8, bias), nn.Linear(16, 8, bias)
        self.o = nn.Linear(16, 16, not bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x), self.o(x + 1)], dim=-1)


def joins_of(model: nn.Module, x: torch.Tensor, works: bool = True) -> list[Any]:
    with LinearUses(model) as uses:
        model(x)
    return list(find_joins(model, uses.with_same_input(), set(), OPS, lambda: works))


@torch.inference_mode()
def test_joined_layers_give_the_same() -> None:
    for bias in (True, False):
        model, x = nn.Sequential(Projections(bias)), torch.randn(1, 5, 16)
        expected = model(x)
        q = model[0].q
        (join,) = joins_of(model, x)
        assert [one.out_features for one in join.layers] == [24, 8, 8]
        join.pack(OPS, Parts())
        torch.testing.assert_close(model(x), expected)
        assert isinstance(model[0].q, JoinedLinearModule)
        assert type(model[0].o) is nn.Linear
        assert q.weight is None


def test_nothing_is_joined_if_the_model_fails_with_strided_rows() -> None:
    seen = []
    model, x = Projections(), torch.randn(1, 5, 16)

    def works() -> bool:
        seen.append(model.q(x).is_contiguous())
        return False

    with LinearUses(model) as uses:
        model(x)
    assert find_joins(model, uses.with_same_input(), set(), OPS, works) == []
    assert seen == [False]
    assert model.q(x).is_contiguous()
    assert find_joins(model, uses.with_same_input(), {model.k, model.v}, OPS, lambda: True) == []


def test_layers_with_other_inputs_are_not_joined() -> None:
    class Apart(Projections):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.q(x), self.k(x.clone()), self.v(x * 1), self.o(x + 1)], dim=-1)

    assert joins_of(Apart(), torch.randn(1, 5, 16)) == []


@torch.inference_mode()
def test_a_product_is_computed_once_per_input_and_then_forgotten() -> None:
    weight = torch.randn(12, 16)
    product = JoinedProduct(OPS, OPS.pack_linear(weight), 2)
    x, y = torch.randn(3, 16), torch.randn(3, 16)
    first = product.output_for(0, x)
    assert product.output_for(1, x) is first
    assert product._input is None
    assert product.output_for(0, x) is not first  # called twice: the input may have changed
    torch.testing.assert_close(product.output_for(1, y), y @ weight.T)
