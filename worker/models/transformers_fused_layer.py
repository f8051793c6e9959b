"""Whole layers of models that Transformers computes, as a sequence of operations of the kernels without Python between.

A layer is replaced if it consists of the parts of a Llama-shaped layer, all of which have been replaced already, and if
a trial over pages gives the same outputs of every layer as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from quire.kernels.ops import Ops, PackedLinear
from quire.worker.models import transformers_attention as attention
from quire.worker.models.transformers_fused_linear import JoinedLinearModule, JoinedProduct
from quire.worker.models.transformers_fused_mlp import PackedMlp
from quire.worker.models.transformers_fused_norm import RmsNorm
from quire.worker.models.transformers_fused_rotary import Rotation
from quire.worker.models.transformers_linear import PackedLinearModule
from quire.worker.models.transformers_parts import WHOLE, ColumnPart, RowPart

log = logging.getLogger(__name__)

Override = TypeVar("Override")
# Largest relative distance of the output of a layer; differences add up from layer to layer.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


class FusedLayer:
    """A layer of two halves, attention and a gated MLP, each after a norm and added to the residual stream."""

    def __init__(
        self,
        ops: Ops,
        original: Callable[..., Any],
        norms: tuple[RmsNorm, RmsNorm],
        qkv: PackedLinear,
        head_norms: tuple[RmsNorm, RmsNorm] | None,
        o: PackedLinearModule,
        mlp: PackedMlp,
    ) -> None:
        """original: the forward of the layer. norms: before each half. head_norms: of queries and of keys."""
        self._ops, self._original, self.qkv, self.o, self.mlp = ops, original, qkv, o, mlp
        (self.input_norm, self.mlp_norm), self.head_norms = norms, head_norms
        q_and_k = head_norms
        self._head_norms = () if q_and_k is None else (q_and_k[0].weight, q_and_k[1].weight, q_and_k[0].eps)

    def __call__(self, hidden_states: torch.Tensor, *rest: Any, position_embeddings: Any = None, **more: Any) -> Any:
        """hidden_states [1, T, hidden] -> [1, T, hidden]"""
        paged = attention.current()
        if not isinstance(paged, attention.PagedAttention) or position_embeddings is None or rest:
            return self._original(hidden_states, *rest, position_embeddings=position_embeddings, **more)
        ops, first, second = self._ops, self.input_norm, self.mlp_norm
        x = hidden_states.view(-1, hidden_states.shape[-1])
        qkv = ops.linear(ops.rms_norm(x, first.weight, first.eps), self.qkv)
        mixed = paged.attend_rows(qkv, *position_embeddings, *self._head_norms)
        residual = self.o.part.give(ops.linear(mixed, self.o.packed))
        normed = ops.add_rms_norm(x, residual, second.weight, second.eps)
        return self.mlp.rows(normed).add_(residual).view(hidden_states.shape)


def fuse_layers(model: nn.Module, ops: Ops, rotations: dict[nn.Module, Rotation], run: Callable[[], Any]) -> int:
    """Replace the forward of each layer that is Llama-shaped. Returns their number.

    rotations: those that are left to the attention, by its module. run: a trial of the model over pages. All layers
    are taken back if the trial with them has other results.
    """
    layers = {module: found for module in model.modules() if (found := _recognise(module, ops, rotations)) is not None}
    if not layers:
        return 0
    with torch.inference_mode():
        expected = _outputs(list(layers), run)
        for layer, fused in layers.items():
            layer.forward = fused
        try:
            outputs = _outputs(list(layers), run)
            both = zip(outputs, expected, strict=True)
            is_same = all(_is_near(output, other) for output, other in both)
        except Exception:  # any line of a model's code can raise anything
            log.debug("the fused layers fail", exc_info=True)
            is_same = False
    if not is_same:
        for layer in layers:
            del layer.forward
    return len(layers) if is_same else 0


def _recognise(layer: nn.Module, ops: Ops, rotations: dict[nn.Module, Rotation]) -> FusedLayer | None:
    parts = [child for child in layer.children() if not _is_empty(child)]
    norms = [norm for child in parts if (norm := _override(child, RmsNorm)) is not None]
    mlps = [mlp for child in parts if (mlp := _override(child, PackedMlp)) is not None]
    attentions = [child for child in parts if child in rotations]
    if len(norms) != 2 or len(mlps) != 1 or len(attentions) != 1 or len(parts) != 4 or _has_own_parameters(layer):
        return None
    inner = [child for child in attentions[0].children() if not _is_empty(child)]
    joined = [child for child in inner if isinstance(child, JoinedLinearModule)]
    o = [child for child in inner if isinstance(child, PackedLinearModule)]
    head_norms = [norm for child in inner if (norm := _override(child, RmsNorm)) is not None]
    products: set[JoinedProduct] = {child.product for child in joined}
    if len(joined) != 3 or len(products) != 1 or len(o) != 1 or len(head_norms) not in (0, 2):
        return None
    if len(inner) != 4 + len(head_norms) or _has_own_parameters(attentions[0]):
        return None
    if not _are_local(joined, o[0]):
        return None
    of_heads = (head_norms[0], head_norms[1]) if head_norms else None
    return FusedLayer(ops, layer.forward, (norms[0], norms[1]), products.pop().packed, of_heads, o[0], mlps[0])


def _are_local(joined: list[JoinedLinearModule], o: PackedLinearModule) -> bool:
    """True if the product of queries, keys and values is of the heads that `o` multiplies on this rank."""
    if not isinstance(o.part, RowPart):
        return o.part is WHOLE and all(one.part is WHOLE for one in joined)
    parts = [one.part for one in joined]  # a kv head that all ranks have is computed as a whole
    is_split = isinstance(parts[0], ColumnPart)
    return is_split and not any(isinstance(one, ColumnPart) and one.gathered_by is not None for one in parts)


def _override(module: nn.Module, kind: type[Override]) -> Override | None:
    """The forward that has replaced that of the module's class, if it is of this kind."""
    found = vars(module).get("forward")
    return found if isinstance(found, kind) else None


def _is_empty(module: nn.Module) -> bool:
    """True for modules without weights, such as dropout. The trial shows whether they do something."""
    return not any(isinstance(one, PackedLinearModule | JoinedLinearModule) for one in module.modules()) and (
        next(module.parameters(), None) is None and _override(module, RmsNorm) is None
    )


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _outputs(layers: list[nn.Module], run: Callable[[], Any]) -> list[torch.Tensor]:
    """The outputs of these layers while the model runs."""
    kept: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        kept.append(output.clone())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    differ, size = (found - expected).float().norm(dim=-1), expected.float().norm(dim=-1)
    return bool((differ <= NEAR[expected.dtype] * size).all())
