"""All layers of a model that Transformers computes and its final norm, as one operation of the kernels.

The model still calls every layer. The first call computes all of them, and the others return what they are given. That
is done only for models whose layers are all `FusedLayer`s, one after the other, and after a trial.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quire.kernels.ops import LayerStack, Ops
from quire.worker.models import transformers_attention as attention
from quire.worker.models.decoder import Layer
from quire.worker.models.transformers_attention import AttentionShape
from quire.worker.models.transformers_examine import apart
from quire.worker.models.transformers_fused_layer import NEAR, FusedLayer
from quire.worker.models.transformers_fused_norm import RmsNorm
from quire.worker.models.transformers_parts import WHOLE

log = logging.getLogger(__name__)

Caches = list[tuple[torch.Tensor, torch.Tensor]]


class FusedStack:
    """The layers of a model, the final norm, and the output of the step that is running."""

    def __init__(self, ops: Ops, layers: list[FusedLayer], shapes: list[AttentionShape], final_norm: RmsNorm) -> None:
        """shapes: of the attention of each layer. Only their windows may differ."""
        self._ops, self._shape, self._eps = ops, shapes[0], final_norm.eps
        self._final_norm = final_norm.weight
        self._layers = [_stack_layer(one, shape) for one, shape in zip(layers, shapes, strict=True)]
        self._table = torch.empty(0)  # rotations of the tokens of a step
        self._caches: Caches = []
        self._stack: LayerStack | None = None
        self._input: torch.Tensor | None = None
        self._cos: torch.Tensor | None = None
        self._output = torch.empty(0)

    def run(self, hidden_states: torch.Tensor, paged: attention.PagedAttention, cos: Any, sin: Any) -> None:
        """Compute all layers and the final norm of hidden_states [1, T, H], and keep the result."""
        self._input = None
        calls = paged.take_calls(len(self._layers))
        table = paged.table_of(cos, sin)
        stack = self._stack_for([caches for _, caches in calls], table)
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).clone()
        self._output = paged.run_stack(x, stack)
        self._input, self._cos = hidden_states, cos

    def is_input(self, hidden_states: torch.Tensor, cos: torch.Tensor | None = None) -> bool:
        """True for the tensor that the last `run` was called with. cos: of the rotations of a layer.

        Raises RuntimeError for other rotations than those of the first layer.
        """
        if hidden_states is not self._input:
            return False
        if cos is not None and cos is not self._cos:
            raise RuntimeError("the layers of the model have several rotations")
        return True

    def take_output(self) -> torch.Tensor:
        """Return the output of the final norm [1, T, H] of the last `run`, once."""
        output, self._input, self._cos, self._output = self._output, None, None, torch.empty(0)
        return output[None]

    def _stack_for(self, caches: Caches, table: torch.Tensor) -> LayerStack:
        """Return the stack for these caches, with the rotations of this step. Other caches need a new stack."""
        is_known = [id(one) for pair in caches for one in pair] == [id(one) for pair in self._caches for one in pair]
        if self._stack is None or not is_known or len(table) > len(self._table):
            self._table = torch.zeros(max(len(table), len(self._table)), table.shape[1])
            self._caches = caches
            shape = self._shape
            heads = shape.num_heads, shape.num_kv_heads
            self._stack = self._ops.stack_layers(
                self._layers, self._final_norm, caches, self._table, *heads, self._eps, shape.scale, None, shape.softcap
            )
        self._table[: len(table)] = table
        return self._stack


def _stack_layer(layer: FusedLayer, shape: AttentionShape) -> Layer:
    q_norm, k_norm = (norm.weight for norm in layer.head_norms) if layer.head_norms else (None, None)
    return Layer(
        input_norm=layer.input_norm.weight,
        qkv=layer.qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        sliding_window=shape.sliding_window,
        o=layer.o.packed,
        mlp_norm=layer.mlp_norm.weight,
        gate_up=layer.mlp.gate_up,
        down=layer.mlp.down,
    )


class StackedLayer:
    """The forward of a layer of a `FusedStack`."""

    def __init__(self, stack: FusedStack, layer: FusedLayer, is_first: bool) -> None:
        self._stack, self._layer, self._is_first = stack, layer, is_first

    def __call__(self, hidden_states: torch.Tensor, *rest: Any, position_embeddings: Any = None, **more: Any) -> Any:
        """hidden_states [1, T, H] -> the same, if the stack computes it."""
        if self._is_first and not rest and position_embeddings is not None:
            paged = attention.current()
            if isinstance(paged, attention.PagedAttention):
                self._stack.run(hidden_states, paged, *position_embeddings)
        if position_embeddings is not None and self._stack.is_input(hidden_states, position_embeddings[0]):
            return hidden_states
        return self._layer(hidden_states, *rest, position_embeddings=position_embeddings, **more)


class StackedNorm(RmsNorm):
    """The forward of the final norm of a `FusedStack`."""

    def __init__(self, stack: FusedStack, norm: RmsNorm, ops: Ops) -> None:
        super().__init__(ops, norm.weight, norm.eps, norm.original)
        self._stack = stack

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._stack.take_output() if self._stack.is_input(x) else super().__call__(x)


def fuse_stack(model: nn.Module, ops: Ops, shapes: list[AttentionShape], run: Callable[[], torch.Tensor]) -> bool:
    """Make the layers of a model one operation. Returns whether that was done.

    shapes: of its attention calls. run: a trial of the model over pages, which returns logits. All is taken back if the
    logits are others.
    """
    layers = [module for module in model.modules() if isinstance(vars(module).get("forward"), FusedLayer)]
    fused: list[FusedLayer] = [vars(module)["forward"] for module in layers]
    if len(layers) < 2 or len(layers) != len(shapes) or any(one.o.part is not WHOLE for one in fused):
        return False
    with torch.inference_mode():
        norm, expected = _final_norm(model, layers, run)
        if norm is None or not _are_alike(shapes, fused, vars(norm)["forward"]):
            return False
        of_norm: RmsNorm = vars(norm)["forward"]
        stack = FusedStack(ops, fused, shapes, of_norm)
        overridden: list[Any] = [*layers, norm]
        stacked = [StackedLayer(stack, one, one is fused[0]) for one in fused]
        for module, forward in zip(overridden, [*stacked, StackedNorm(stack, of_norm, ops)], strict=True):
            module.forward = forward
        try:
            is_same = apart(run(), expected) < NEAR[ops.dtype]
        except Exception:  # any line of a model's code can raise anything
            log.debug("the layers of %s as one operation fail", type(model).__name__, exc_info=True)
            is_same = False
        if not is_same:
            for module, original in zip(overridden, [*fused, of_norm], strict=True):
                module.forward = original
    return is_same


def _are_alike(shapes: list[AttentionShape], layers: list[FusedLayer], final: RmsNorm) -> bool:
    """True if one operation can compute the layers: one kind of attention, apart from windows, and one epsilon."""
    kinds = {(one.num_heads, one.num_kv_heads, one.cache_dim, one.scale, one.softcap) for one in shapes}
    is_plain = all(
        one.latent is None
        and one.shared_with is None
        and not one.chunk
        and not one.has_sinks
        and one.head_dim == one.value_dim == one.cache_dim
        for one in shapes
    )
    norms = [norm for one in layers for norm in (one.input_norm, one.mlp_norm, *(one.head_norms or ()))]
    return is_plain and len(kinds) == 1 and all(norm.eps == final.eps for norm in norms)


def _final_norm(
    model: nn.Module, layers: list[nn.Module], run: Callable[[], torch.Tensor]
) -> tuple[nn.Module | None, torch.Tensor]:
    """Return the norm that takes the output of the last layer, and the logits of the trial.

    None if the layers do not run one after the other, each with the output of the layer before it.
    """
    inside = {module for layer in layers for module in layer.modules()}
    norms = [module for module in model.modules() if isinstance(vars(module).get("forward"), RmsNorm)]
    outer = [norm for norm in norms if norm not in inside]
    calls: list[tuple[nn.Module, Any, Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append((module, args[0] if args else None, output))

    hooks = [module.register_forward_hook(note) for module in (*layers, *outer)]
    try:
        logits = run()
    finally:
        for hook in hooks:
            hook.remove()
    order = [*layers, calls[-1][0]] if calls else []
    steps = [calls[start : start + len(order)] for start in range(0, len(calls), max(1, len(order)))]
    for step in steps:
        if [module for module, _, _ in step] != order:
            return None, logits
        if any(given is not before for (_, _, before), (_, given, _) in itertools.pairwise(step)):
            return None, logits
    return (calls[-1][0], logits) if calls and calls[-1][0] in outer else (None, logits)
