"""Replaces linear layers of models that Transformers computes by GEMMs of the kernels.

A packed layer has no weight that torch can read. So a layer is packed only if the model calls it and does not read its
weight otherwise: some routers of experts multiply by the weight of a layer that they never call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.kernels.ops import Ops, PackedLinear
from quire.worker.models.files.loader import Progress
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE, LayerWeights
from quire.worker.models.transformers.parts import WHOLE, ModulePart, Parts

# Attributes of a weight that the weight of a packed layer also has.
KEPT_ATTRIBUTES = (torch.Tensor.dtype.__get__, torch.Tensor.device.__get__)  # type: ignore[attr-defined]


class PackedLinearModule(nn.Module):
    """A linear layer whose GEMM the kernels compute."""

    def __init__(
        self,
        ops: Ops,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gives_logits: bool,
        part: ModulePart = WHOLE,
        weights: LayerWeights = AS_THEY_ARE,
    ) -> None:
        """weight [N, K], bias [N], both of this part. gives_logits: return float32. weights: how they are packed."""
        super().__init__()
        self.part = part
        self.packed: PackedLinear = ops.pack_linear(weights.joined([weight]), bias)
        self.weight = weight.new_empty(0)  # some models read its dtype
        if bias is None:
            self.bias = None
        self._multiply = ops.linear_logits if gives_logits else ops.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]"""
        rows = self.part.take(x).reshape(-1, self.packed.in_features).contiguous()
        return self.part.give(self._multiply(rows, self.packed).view(*x.shape[:-1], self.packed.out_features))


class LinearUses(TorchFunctionMode):
    """Records how a model that runs inside this context uses its linear layers.

    Layers whose names differ in numbers only, such as those of all experts, are one kind: a short text does not call
    every one of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._kinds = {module: kind_of(name) for name, module in linear_layers(model)}
        self._called: set[str] = set()
        self._read: set[str] = set()
        self._own: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
        self._watched: dict[int, nn.Module] = {}  # by the id of a parameter
        self._running: list[nn.Module] = []
        self._inputs: dict[nn.Module, list[torch.Tensor]] = {}
        self._names = {module: name for name, module in linear_layers(model)}
        self._hooks: list[Any] = []

    def __enter__(self) -> LinearUses:
        for module in self._kinds:
            self._own[module] = dict(module._parameters)
            for name, parameter in self._own[module].items():
                if parameter is not None:
                    # A new object with the same memory, because a head may share its parameter with an embedding.
                    alias = nn.Parameter(parameter.data, requires_grad=False)
                    module._parameters[name], self._watched[id(alias)] = alias, module
            self._hooks += [module.register_forward_pre_hook(self._enter_layer)]
            self._hooks += [module.register_forward_hook(self._leave_layer)]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        for module, parameters in self._own.items():
            module._parameters.update(parameters)
        self._watched.clear()
        self._own.clear()  # the weights would stay in memory

    def unpackable(self) -> set[nn.Module]:
        """Return the layers of a kind that was not called, or whose weight or bias was read outside of a call."""
        return {module for module, kind in self._kinds.items() if kind in self._read or kind not in self._called}

    def left_to_torch(self, model: nn.Module) -> list[nn.Module]:
        """Return the linear layers of the model that are in use and not packed."""
        used = self._called | self._read
        return [module for _, module in linear_layers(model) if self._kinds[module] in used]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT_ATTRIBUTES:
            for tensor in _tensors([args, kwargs or {}]):
                module = self._watched.get(id(tensor))
                if module is not None and module not in self._running:
                    self._read.add(self._kinds[module])
        return func(*args, **(kwargs or {}))

    def with_same_input(self) -> list[list[nn.Module]]:
        """Return the layers of one module that were always called with the same tensor, in the order of the module."""
        groups: dict[tuple[str, tuple[int, ...]], list[nn.Module]] = {}
        left = self.unpackable()
        for module, name in self._names.items():
            if module in self._inputs and module not in left:
                key = name.rpartition(".")[0], tuple(map(id, self._inputs[module]))
                groups.setdefault(key, []).append(module)
        return [group for group in groups.values() if len(group) > 1]

    def forget_inputs(self) -> None:
        """Free the memory of the recorded inputs."""
        self._inputs.clear()

    def _enter_layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._called.add(self._kinds[module])
        self._inputs.setdefault(module, []).extend(args)
        self._running.append(module)

    def _leave_layer(self, *_: Any) -> None:
        self._running.pop()


class Fusion(Protocol):
    """Weights of a model that are packed together, and replace its linear `layers`."""

    @property
    def layers(self) -> Collection[nn.Module]: ...

    @property
    def nbytes(self) -> int: ...

    def pack(self, ops: Ops, parts: Parts, weights: LayerWeights = AS_THEY_ARE) -> None:
        """Pack the weights of this rank, drop the originals, and make the model use the packed ones."""


def pack(
    model: Any,
    ops: Ops,
    progress: Progress | None = None,
    left: set[nn.Module] | None = None,
    fusions: Sequence[Fusion] = (),
    parts: Parts | None = None,
    weights: LayerWeights = AS_THEY_ARE,
) -> None:
    """Pack the fusions, then replace each other linear layer that is not in `left` by a `PackedLinearModule`.

    parts: of this rank. weights: how they are packed. At most the weights of one fusion are in memory twice.
    `progress` is called with the packed bytes and with all.
    """
    head, left, parts = model.get_output_embeddings(), left or set(), parts or Parts()
    made: dict[nn.Module, PackedLinearModule] = {}
    fused = {layer for fusion in fusions for layer in fusion.layers}
    ours = (module for _, module in linear_layers(model) if module not in left and module.weight.dtype is ops.dtype)
    packed = {module for module in ours if module not in fused}
    done, total = 0, sum(module.weight.nbytes for module in packed) + sum(fusion.nbytes for fusion in fusions)
    for fusion in fusions:
        done += fusion.nbytes
        fusion.pack(ops, parts, weights)
        if progress is not None:
            progress(done, total)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child])
            elif child in packed:
                done += child.weight.nbytes
                part = parts.cut(child)
                weight = child.weight.data if type(child) is nn.Linear else child.weight.data.t()
                bias = None if child.bias is None else child.bias.data
                made[child] = PackedLinearModule(ops, weight, bias, child is head, part, weights)
                child.weight = child.bias = None
                setattr(parent, name, made[child])
                if progress is not None:
                    progress(done, total)
    parts.give_left_experts()


def linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return names and modules of linear layers. Derived classes are left out: they may compute something else."""
    from transformers.pytorch_utils import Conv1D

    return [(name, module) for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]


def kind_of(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
