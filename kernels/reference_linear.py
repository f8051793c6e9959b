"""The weights of linear layers and of experts in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.moe import Routing, activate, compute
from quire.kernels.ops import PackedLinear
from quire.kernels.quantization import QuantizedLinear


@dataclass(frozen=True, eq=False)
class ReferenceLinear:
    """Weights as torch.nn.Linear keeps them."""

    weight: Tensor  # [N, K]
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


ReferencePacked = ReferenceLinear | QuantizedLinear


@dataclass(frozen=True, eq=False)
class ReferenceMoE:
    """A router and its experts: gate_up and down of each."""

    routing: Routing
    router: PackedLinear
    experts: list[tuple[ReferencePacked, ReferencePacked]]
    scales: Tensor | None = None  # [E] float32, of `Ops.pack_moe`

    @property
    def hidden(self) -> int:
        return self.router.in_features

    @property
    def inner(self) -> int:
        return self.experts[0][1].in_features

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + sum(packed.nbytes for pair in self.experts for packed in pair)


def reference_moe(
    x: Tensor, ids: Tensor, weights: Tensor, packed: ReferenceMoE, product: Callable[[Tensor, PackedLinear], Tensor]
) -> Tensor:
    """Return the sum over the chosen experts, [T, hidden]. ids, weights [T, k]: of `moe.route`; product: of a layer."""

    def expert(number: int, rows: Tensor) -> Tensor:
        gate_up, down = packed.experts[number]
        return product(activate(product(rows, gate_up), packed.routing.activation), down)

    return compute(x, ids, weights, expert, packed.routing.num_experts)
