"""Linear layers and experts in plain torch."""

import torch

from quire.kernels.moe import Routing
from quire.kernels.reference_linear import ReferenceLinear, ReferenceMoE, reference_moe


def linear(x: torch.Tensor, packed: ReferenceLinear) -> torch.Tensor:
    return torch.nn.functional.linear(x, packed.weight, packed.bias)


def test_experts_are_added_up_with_their_weights() -> None:
    layers = [(ReferenceLinear(torch.randn(6, 4), None), ReferenceLinear(torch.randn(4, 3), None)) for _ in range(2)]
    packed = ReferenceMoE(Routing(2, 2, True), ReferenceLinear(torch.randn(2, 4), torch.zeros(2)), layers)
    assert (packed.hidden, packed.inner, packed.nbytes) == (4, 3, 4 * (2 * (24 + 12) + 10))
    x, ids, weights = torch.randn(5, 4), torch.tensor([[0, 1]] * 5), torch.tensor([[0.25, 0.75]] * 5)
    found = reference_moe(x, ids, weights, packed, linear)

    def expert(gate_up: ReferenceLinear, down: ReferenceLinear) -> torch.Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        return linear(torch.nn.functional.silu(gate) * up, down)

    torch.testing.assert_close(found, 0.25 * expert(*layers[0]) + 0.75 * expert(*layers[1]))
