"""Gated MLPs of models that Transformers computes: down(silu(gate(x)) * up(x)) as two operations of the kernels.

A module is recognised by its linear layers and by its results on random rows, whatever its names are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.ops import Ops, PackedLinear
from quire.worker.models.transformers.fused_linear import PackedPart
from quire.worker.models.transformers.fused_norm import is_near
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE, LayerWeights
from quire.worker.models.transformers.linear import PackedLinearModule
from quire.worker.models.transformers.parts import WHOLE, ModulePart, Parts


class PackedMlp:
    """The forward of a gated MLP, with packed weights."""

    def __init__(self, ops: Ops, gate_up: PackedLinear, down: PackedLinear, part: ModulePart = WHOLE) -> None:
        """part: of `down` on this rank."""
        self._ops, self.gate_up, self.down, self._part = ops, gate_up, down, part

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        rows = x.reshape(-1, self.gate_up.in_features).contiguous()
        output = self._part.give(self._ops.linear(self._ops.linear_silu_mul(rows, self.gate_up), self.down))
        return output.view(*x.shape[:-1], output.shape[-1])


class GatedMlp(NamedTuple):
    """A recognised MLP. `gate` and `up` are one layer, `merged`, in some models."""

    module: Any  # nn.Module
    inner: tuple[Any, ...]  # nn.Linear: gate and up, or both in one
    down: Any  # nn.Linear
    gate_first: bool  # of a merged layer: the gate is the first half

    @property
    def layers(self) -> tuple[Any, ...]:
        return (*self.inner, self.down)

    @property
    def nbytes(self) -> int:
        return sum(layer.weight.nbytes for layer in self.layers)

    def halves(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return gate and up, of the weights or biases of `inner`."""
        parts = weights if len(weights) == 2 else list(weights[0].chunk(2))
        return parts if self.gate_first else parts[::-1]

    def pack(self, ops: Ops, parts: Parts, weights: LayerWeights = AS_THEY_ARE) -> None:
        """Pack the weights, drop the originals, and replace the forward of the module."""
        part, *_ = [parts.cut(layer) for layer in (self.down, *self.inner)]
        weight = self.inner[0].weight.data
        bias = None if self.inner[0].bias is None else torch.cat(self.halves([layer.bias.data for layer in self.inner]))
        packed = ops.pack_gate_up(weights.joined(self.halves([layer.weight.data for layer in self.inner])), bias)
        down_bias = None if self.down.bias is None else self.down.bias.data
        down = PackedLinearModule(ops, self.down.weight.data, down_bias, gives_logits=False, part=part, weights=weights)
        for name, child in list(self.module.named_children()):
            if child in self.inner:
                child.weight = child.bias = None
                setattr(self.module, name, PackedPart(weight, packed if child is self.inner[0] else None))
            elif child is self.down:
                child.weight = child.bias = None
                setattr(self.module, name, down)
        self.module.forward = PackedMlp(ops, packed, down.packed, part)


def find_mlps(model: nn.Module, left: set[nn.Module], ops: Ops) -> list[GatedMlp]:
    """Return the gated MLPs with SiLU whose linear layers are not in `left`."""
    mlps = (recognise(module, left, ops) for module in model.modules())
    return [mlp for mlp in mlps if mlp is not None]


def recognise(module: nn.Module, left: set[nn.Module], ops: Ops) -> GatedMlp | None:
    """Return what the module computes if it is a gated MLP with SiLU, or None."""
    linear = [child for child in module.children() if type(child) is nn.Linear]
    if len(linear) not in (2, 3) or any(layer in left or layer.weight.dtype is not ops.dtype for layer in linear):
        return None
    if next(module.parameters(recurse=False), None) is not None or not _takes_one_tensor(module):
        return None
    if sum(1 for child in module.modules() if type(child) is nn.Linear) != len(linear):
        return None  # other linear layers are further below
    for candidate in _candidates(module, linear):
        rows = torch.randn(1, 4, candidate.inner[0].in_features, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            rows = rows.to(ops.dtype).to(candidate.down.weight.device)
            try:
                expected = module.forward(rows.clone())
            except Exception:  # any line of a model's code can raise anything
                return None
            if not isinstance(expected, torch.Tensor) or expected.shape[-1] != candidate.down.out_features:
                return None
            if is_near(_reference(candidate, rows), expected):
                return candidate
    return None


def _takes_one_tensor(module: nn.Module) -> bool:
    parameters = list(inspect.signature(module.forward).parameters.values())
    return len(parameters) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD


def _candidates(module: nn.Module, linear: list[Any]) -> Iterator[GatedMlp]:
    """Yield each way in which the layers can be those of a gated MLP, by their shapes."""
    for down in linear:
        inner = tuple(layer for layer in linear if layer is not down)
        if len({(layer.in_features, layer.out_features, layer.bias is None) for layer in inner}) != 1:
            continue
        if sum(layer.out_features for layer in inner) == 2 * down.in_features:
            yield GatedMlp(module, inner, down, True)
            yield GatedMlp(module, inner, down, False)


def _reference(mlp: GatedMlp, x: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.halves([F.linear(x, layer.weight, layer.bias).transpose(0, -1) for layer in mlp.inner])
    output: torch.Tensor = mlp.down(F.silu(gate.transpose(0, -1)) * up.transpose(0, -1))
    return output
