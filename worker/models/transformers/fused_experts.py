"""Mixtures of experts that Transformers keeps as stacked weights, as one product per expert that has rows.

Transformers describes the layout of such modules by attributes (`use_experts_implementation` in its source), so that
other implementations can compute them. A module is replaced only if two of its experts give the same results packed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.ops import Ops, PackedLinear
from quire.worker.models.transformers.fused_norm import is_near
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE, LayerWeights
from quire.worker.models.transformers.parts import Parts

# Products, biases, gates and sums are rounded one after the other by torch.
ROUNDINGS = 4
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


class Expert(NamedTuple):
    """The packed weights of one expert."""

    inner: PackedLinear  # gate and up, or up alone
    down: PackedLinear


class StackedExperts:
    """The weights of all experts of a layer, in parameters with three dimensions: a `Fusion`."""

    layers: tuple[nn.Module, ...] = ()  # linear layers that it replaces

    def __init__(self, module: Any, ops: Ops) -> None:
        """module: has the attributes FLAGS. With SiLU, product and activation are one operation of the kernels."""
        self._module, self._ops = module, ops
        self._inner_name = "gate_up_proj" if module.has_gate else "up_proj"
        self._act: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate if module.has_gate else module.act_fn
        self._is_silu_mul = bool(module.has_gate) and self._computes_silu_mul()
        self.num_experts: int = module.down_proj.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._module.parameters(recurse=False))

    def works(self) -> bool:
        """Compare two packed experts with the module on random rows."""
        width = self._stacked(self._inner_name).shape[1 if self._module.is_transposed else 2]
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(5, width, generator=generator).to(self._ops.dtype)
        index = torch.tensor([[0, self.num_experts - 1]] * 5)
        weights = torch.rand(5, 2, generator=generator).to(self._ops.dtype)
        try:
            expected = self._module.forward(rows.clone(), index, weights)
            experts = {number: self._pack_expert(number) for number in {0, self.num_experts - 1}}
            return is_near(self._compute(experts, rows, index, weights), expected, ROUNDINGS)
        except Exception:  # any line of a model's code can raise anything
            return False

    def pack(self, ops: Ops, parts: Parts, weights: LayerWeights = AS_THEY_ARE) -> None:
        """Pack the weights, drop the originals, and replace the forward of the module."""
        part = parts.cut(self._module)
        module, signature = self._module, inspect.signature(self._module.forward)
        experts = {number: self._pack_expert(number, weights) for number in range(self.num_experts)}
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.data.new_empty(0), requires_grad=False))
        module.packed = PackedExperts(experts)

        def forward(*args: Any, **named: Any) -> torch.Tensor:
            rows, index, weights = signature.bind(*args, **named).args if named else args
            return part.give(self._compute(experts, rows, index, weights))

        module.forward = forward

    def _compute(
        self, experts: dict[int, Expert], rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """rows [T, H], the experts of each [T, k] and their weights [T, k] -> [T, H]"""
        ops, top_k = self._ops, index.shape[1]
        ids, order = index.reshape(-1).sort(stable=True)
        given, start = rows[order // top_k], 0
        outputs = torch.zeros_like(given)
        for number, count in enumerate(ids.bincount(minlength=self.num_experts)[: self.num_experts].tolist()):
            if count:
                part = slice(start, start + count)
                multiply = ops.linear_silu_mul if self._is_silu_mul else ops.linear
                inner = multiply(given[part], experts[number].inner)
                if not self._is_silu_mul:
                    inner = self._act(inner).contiguous()
                ops.linear(inner, experts[number].down, out=outputs[part])
                start += count
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*index.shape, -1)
        return (by_token * weights[..., None]).sum(dim=1).to(rows.dtype)

    def _pack_expert(self, number: int, weights: LayerWeights = AS_THEY_ARE) -> Expert:
        ops = self._ops
        pack_inner = ops.pack_gate_up if self._is_silu_mul else ops.pack_linear
        inner, down = (weights.joined([self._weight(name, number)]) for name in (self._inner_name, "down_proj"))
        packed = pack_inner(inner, self._bias(self._inner_name, number))
        return Expert(packed, ops.pack_linear(down, self._bias("down_proj", number)))

    def _stacked(self, name: str) -> torch.Tensor:
        stacked: torch.Tensor = getattr(self._module, name).data
        return stacked

    def _weight(self, name: str, number: int) -> torch.Tensor:
        weight = self._stacked(name)[number]
        return weight.t().contiguous() if self._module.is_transposed else weight.contiguous()

    def _bias(self, name: str, number: int) -> torch.Tensor | None:
        return self._stacked(f"{name}_bias")[number].contiguous() if self._module.has_bias else None

    def _computes_silu_mul(self) -> bool:
        """Return whether the module's gating is silu(first half) * second half."""
        rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(self._ops.dtype)
        gate, up = rows.chunk(2, dim=-1)
        return is_near(F.silu(gate) * up, self._act(rows))


class PackedExperts:
    """The packed weights of all experts of a layer, for counting their memory."""

    def __init__(self, experts: dict[int, Expert]) -> None:
        self.nbytes = sum(part.nbytes for expert in experts.values() for part in expert)


def find_experts(model: nn.Module, ops: Ops) -> list[StackedExperts]:
    """Return the modules with stacked experts whose packed weights give the same results."""
    candidates = [StackedExperts(module, ops) for module in model.modules() if is_stacked(module, ops.dtype)]
    with torch.inference_mode():
        return [experts for experts in candidates if experts.works()]


def is_stacked(module: Any, dtype: torch.dtype) -> bool:
    """Return whether this is a module whose layout Transformers describes by FLAGS."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in FLAGS):
        return False
    if getattr(module, "has_post_expert_norm", False):  # Transformers 5.17 has no such attribute
        return False
    if getattr(module, "_is_expert_parallel", True) or not callable(getattr(module, "_apply_gate", None)):
        return False
    own = dict(module.named_parameters(recurse=False))
    weights = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    expected = weights | ({f"{name}_bias" for name in weights} if module.has_bias else set())
    return set(own) == expected and all(weight.dtype is dtype for weight in own.values())
