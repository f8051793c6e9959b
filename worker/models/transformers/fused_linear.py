"""Linear layers with the same input, such as those of queries, keys and values, as one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from quire.kernels import PackedGroups
from quire.kernels.ops import Ops, PackedLinear
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE, LayerWeights
from quire.worker.models.transformers.parts import ModulePart, Parts


class PackedPart(nn.Module):
    """Stands for a linear layer whose weights are a part of `packed` and whose product another module computes."""

    def __init__(self, weight: torch.Tensor, packed: PackedLinear | PackedGroups | None) -> None:
        """packed: counted as the memory of this part; None if another part counts it."""
        super().__init__()
        self.packed = packed
        self.weight = weight.new_empty(0)  # some models read its dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the model calls a linear layer that is part of a fused module")


class JoinedProduct:
    """One product for several linear layers with the same input. The first of them computes the product of all."""

    def __init__(self, ops: Ops, packed: PackedLinear, parts: int) -> None:
        self._multiply, self.packed, self._parts = ops.linear, packed, parts
        self._input: torch.Tensor | None = None
        self._output = torch.empty(0)
        self._left: set[int] = set()

    def output_for(self, part: int, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x with the weights of all parts [..., N], for the part of this number."""
        if x is not self._input or part not in self._left:
            rows = x.reshape(-1, self.packed.in_features).contiguous()
            self._output = self._multiply(rows, self.packed).view(*x.shape[:-1], self.packed.out_features)
            self._input, self._left = x, set(range(self._parts))
        output = self._output
        self._left.discard(part)
        if not self._left:
            self._input, self._output = None, torch.empty(0)
        return output


class JoinedLinearModule(PackedPart):
    """A linear layer whose output is a range of the columns of a `JoinedProduct`."""

    def __init__(
        self, weight: torch.Tensor, product: JoinedProduct, number: int, start: int, has_bias: bool, part: ModulePart
    ) -> None:
        """number: of this layer in the product. start: its first column. part: of this rank."""
        super().__init__(weight, None if number else product.packed)
        self._product, self._number, self._range = product, number, slice(start, start + len(weight))
        self.part = part
        if not has_bias:
            self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N], whose rows are apart by the width of the product."""
        return self.part.give(self._product.output_for(self._number, x)[..., self._range])


class JoinedLayers(NamedTuple):
    """Linear layers of one module that are called with the same tensor."""

    parent: nn.Module
    layers: tuple[Any, ...]  # nn.Linear

    @property
    def nbytes(self) -> int:
        return sum(layer.weight.nbytes for layer in self.layers)

    def pack(self, ops: Ops, parts: Parts, weights: LayerWeights = AS_THEY_ARE) -> None:
        """Pack the weights as one, drop the originals, and replace the layers."""
        cut = [parts.cut(layer) for layer in self.layers]
        has_bias = self.layers[0].bias is not None
        bias = torch.cat([layer.bias.data for layer in self.layers]) if has_bias else None
        packed = ops.pack_linear(weights.joined([layer.weight.data for layer in self.layers]), bias)
        product = JoinedProduct(ops, packed, len(self.layers))
        names, start = {child: name for name, child in self.parent.named_children()}, 0
        for number, (layer, part) in enumerate(zip(self.layers, cut, strict=True)):
            weight, layer.weight, layer.bias = layer.weight.data, None, None
            setattr(self.parent, names[layer], JoinedLinearModule(weight, product, number, start, has_bias, part))
            start += len(weight)


def find_joins(
    model: nn.Module,
    groups: list[list[nn.Module]],
    taken: set[nn.Module],
    ops: Ops,
    still_works: Callable[[], bool],
    weights: LayerWeights = AS_THEY_ARE,
) -> list[JoinedLayers]:
    """Return the groups of layers to join, without layers in `taken`.

    groups: of `LinearUses.with_same_input`. still_works: runs the model and compares its results, while
    the outputs of these layers are views of wider rows, as those of a joined product. No layers are joined if it fails.
    weights: how they are packed. Layers whose weights are quantised in different ways are not joined.
    """
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    joins = []
    for group in groups:
        kinds: dict[tuple[Any, ...], list[Any]] = {}
        for layer in group:
            if type(layer) is nn.Linear and layer not in taken and layer.weight.dtype is ops.dtype:
                kind = layer.in_features, layer.bias is None, weights.kind(layer.weight.data)
                kinds.setdefault(kind, []).append(layer)
        joins += [JoinedLayers(parents[alike[0]], tuple(alike)) for alike in kinds.values() if len(alike) > 1]
    hooks = [layer.register_forward_hook(_in_wider_rows) for join in joins for layer in join.layers]
    try:
        return joins if joins and still_works() else []
    finally:
        for hook in hooks:
            hook.remove()


def _in_wider_rows(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    wide = output.new_empty(*output.shape[:-1], output.shape[-1] + 16)
    wide[..., : output.shape[-1]] = output
    return wide[..., : output.shape[-1]]
