"""Modules of models that Transformers computes, replaced by operations of the kernels when the model is loaded.

Transformers writes a layer as some sixty small operations of torch, which take longer than its matrix products if few
sequences run. Modules are recognised by what they compute: a module is replaced only if the operation gives its results
on random input or in a trial of the model, and is left alone otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quire.kernels.ops import Ops
from quire.worker.models.transformers import attention, trial
from quire.worker.models.transformers.fused_experts import find_experts
from quire.worker.models.transformers.fused_linear import find_joins
from quire.worker.models.transformers.fused_mlp import find_mlps
from quire.worker.models.transformers.fused_norm import NormInputs, fuse_norms
from quire.worker.models.transformers.fused_rotary import Rotation, RotationProbe, defer, replace_rotations
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE, LayerWeights
from quire.worker.models.transformers.linear import Fusion, LinearUses
from quire.worker.models.transformers.shapes import AttentionShape

log = logging.getLogger(__name__)

# Largest relative distance of the logits of two runs that differ in the strides of tensors only.
SAME = 1e-3


@dataclass(frozen=True)
class FusedModules:
    """The modules of a model that the kernels compute, besides its linear layers and attention."""

    fusions: Sequence[Fusion] = ()  # to pack
    rotations: dict[nn.Module, Rotation] = field(default_factory=dict)  # of attention modules, left to the attention
    has_experts: bool = False  # among the fusions
    counts: dict[str, int] = field(default_factory=dict)  # replaced modules by kind

    def log(self, model: nn.Module) -> None:
        """Log how many modules of each kind are replaced."""
        summary = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        log.info("%s: the kernels compute %s", type(model).__name__, summary)


def fuse(
    model: Any,
    ops: Ops,
    uses: LinearUses,
    norms: NormInputs,
    text: torch.Tensor,
    shapes: list[AttentionShape],
    weights: LayerWeights = AS_THEY_ARE,
) -> FusedModules:
    """Recognise modules of a model on the CPU that has run inside `uses` and `norms`.

    The attention of the model is `attention.PAGED`; shapes: of its calls. weights: how they are packed. Norms and
    rotations are replaced here, other modules when `pack` packs the fusions.
    """
    if ops.device.type != "cpu":
        return FusedModules()
    left = uses.unpackable()
    num_norms = fuse_norms(norms, ops)
    mlps = find_mlps(model, left, ops)
    experts = find_experts(model, ops)
    rotations = replace_rotations(model)

    def run() -> torch.Tensor:
        with attention.running(RotationProbe(rotations)):
            return trial.by_transformers(model, [text])

    expected = run()

    def still_works() -> bool:
        try:
            output = run()
        except Exception:  # any line of a model's code can raise anything
            log.debug("linear layers are not joined", exc_info=True)
            return False
        return bool((output - expected).norm() <= SAME * expected.norm())

    taken = {layer for mlp in mlps for layer in mlp.layers}
    joins = find_joins(model, uses.with_same_input(), taken, ops, still_works, weights)
    uses.forget_inputs()
    widths = {shape.head_dim for shape in shapes if shape.head_dim == shape.cache_dim}
    if any(shape.shared_with is not None for shape in shapes):
        widths = set()  # queries are rotated together with the keys that are written to the cache
    deferred = defer(rotations, widths)
    counts = {
        "norms": num_norms,
        "gated MLPs": len(mlps),
        "joined products": len(joins),
        "rotary embeddings": len(deferred),
        "mixtures of experts": len(experts),
    }
    return FusedModules([*mlps, *experts, *joins], deferred, bool(experts), counts)


def packed_bytes(model: nn.Module) -> int:
    """Return the memory of all packed weights of the model."""
    packed: set[Any] = {getattr(module, "packed", None) for module in model.modules()} - {None}
    return sum(layer.nbytes for layer in packed)
