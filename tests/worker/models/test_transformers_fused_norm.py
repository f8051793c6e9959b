"""Norms are recognised by their results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire import kernels
from quire.worker.models.transformers_fused_norm import NormInputs, RmsNorm, fuse_norms, is_near, recognise

WIDTH = 48


class Norm(nn.Module):
    """RMSNorm with a given use of its weight."""

    def __init__(self, offset: float = 0.0, eps: float = 1e-6, centred: bool = False, power: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 1.5, WIDTH))
        self.eps, self.offset, self.centred, self.power = eps, offset, centred, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        if self.centred:
            values = values - values.mean(-1, keepdim=True)
        values = values * torch.rsqrt(values.abs().pow(self.power).mean(-1, keepdim=True) + self.eps)
        return (values * (self.offset + self.weight.float())).type_as(x)


class NoWeight(nn.Module):
    eps: float

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm", [Norm(), Norm(offset=1), Norm(eps=1e-3), Norm(centred=True)], ids=["rms", "1+w", "eps", "centred"]
)
@torch.inference_mode()
def test_a_recognised_norm_gives_the_same(norm: Norm, dtype: torch.dtype) -> None:
    module = norm.to(dtype)
    found = recognise(module, WIDTH, kernels.select_ops("cpu", dtype))
    assert found is not None
    assert isinstance(found, RmsNorm) is not norm.centred
    x = torch.randn(1, WIDTH, 7, dtype=dtype).transpose(1, 2)  # not contiguous
    assert is_near(found(x), module(x))
    other = torch.randn(2, WIDTH, dtype=torch.float64)
    if not norm.centred:
        torch.testing.assert_close(found(other), module(other))


@pytest.mark.parametrize("norm", [Norm(offset=0.5), Norm(power=1), Norm(eps=0.5)])
def test_another_function_is_left_alone(norm: Norm) -> None:
    assert recognise(norm, WIDTH, kernels.select_ops("cpu", torch.float32)) is None


@torch.inference_mode()
def test_norms_that_were_called_with_one_width_are_replaced() -> None:
    model = nn.ModuleDict({"called": Norm(), "unused": Norm(), "two": NoWeight(), "one": NoWeight()})
    x = torch.randn(3, WIDTH)
    with NormInputs(model) as inputs:
        model["called"](x), model["two"](x), model["two"](x[:, :16]), model["one"](x)
    expected = model["one"](x)
    assert fuse_norms(inputs, kernels.select_ops("cpu", torch.float32)) == 2
    assert {name for name, one in model.items() if "forward" in vars(one)} == {"called", "one"}
    torch.testing.assert_close(model["one"](x), expected)


def test_rows_of_zeros_tell_nothing() -> None:
    assert not is_near(torch.zeros(2, 4), torch.zeros(2, 4))
    assert is_near(torch.ones(2, 4), torch.ones(2, 4))
    assert not is_near(torch.ones(2, 4), torch.ones(2, 4).bfloat16())
