"""Gated MLPs are recognised by their layers and results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quire import kernels
from quire.worker.models.transformers_fused_mlp import find_mlps
from quire.worker.models.transformers_parts import Parts


class Mlp(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = F.silu, bias: bool = False) -> None:
        super().__init__()
        # The order of definition is not that of the computation.
        self.c, self.b, self.a = nn.Linear(24, 16, bias), nn.Linear(16, 24, bias), nn.Linear(16, 24, bias)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.c(self.act(self.a(x)) * self.b(x))
        return found


class Merged(nn.Module):
    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.gate_first = nn.Linear(16, 48), nn.Linear(24, 16), gate_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.inner(x).chunk(2, dim=-1)
        found: torch.Tensor = self.outer(F.silu(one) * two if self.gate_first else one * F.silu(two))
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [Mlp, lambda: Mlp(bias=True), lambda: Merged(True), lambda: Merged(False)], ids=["3", "bias", "2", "up"]
)
@torch.inference_mode()
def test_a_packed_mlp_gives_the_same(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    ops, x, model = kernels.select_ops("cpu", dtype), torch.randn(2, 5, 16).to(dtype), nn.Sequential(make().to(dtype))
    expected = model(x)
    (mlp,) = find_mlps(model, set(), ops)
    assert len(mlp.layers) == len(list(model[0].children()))
    mlp.pack(ops, Parts())
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=1e-4 if dtype is torch.float32 else 2e-2)
    assert not [one for one in model.modules() if type(one) is nn.Linear]
    assert not list(model.parameters())


def test_other_activations_and_layers_that_must_stay_are_left_alone() -> None:
    ops, kept = kernels.select_ops("cpu", torch.float32), Mlp()
    assert find_mlps(nn.Sequential(Mlp(F.gelu), Mlp(torch.sigmoid)), set(), ops) == []
    assert find_mlps(nn.Sequential(kept), {kept.b}, ops) == []
    assert len(find_mlps(nn.Sequential(kept), set(), ops)) == 1
    assert find_mlps(nn.Sequential(kept.bfloat16()), set(), ops) == []
