"""Paged attention for models that Transformers computes, in place of its own attention.

Transformers calls an attention function that is registered by name, once per layer. Two are registered here. `paged`
computes a step. `examined` computes nothing: it records the parameters of each call, so that a model that needs more
than paged attention offers, such as a cap on its scores, is refused before it serves a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from quire.kernels.ops import Ops
from quire.worker.models.batch import ForwardBatch

PAGED, EXAMINED = "quire_paged", "quire_examined"
# Arguments of layers that do not change their attention.
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_router_logits", "logits_to_keep", "is_causal"}
# Number of positions whose masks are checked, besides the first and the last ones.
SAMPLED_POSITIONS = 16
# Sentinel width: the mask is not a sliding window. Some models make such masks, and no layer uses them.
NO_WINDOW, OTHER_MASKS = -1, "its masks are neither causal nor those of a window"


class UnsupportedAttention(Exception):
    """A layer needs an attention that is not supported. The message names the unsupported property."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters of one attention call. The n-th call of every step has these same parameters and the n-th cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int  # at most head_dim
    scale: float
    sliding_window: int  # 0: none

    @property
    def cache_dim(self) -> int:
        """The width of a key in the cache: a multiple of 16, as kernels need it, padded with zeros."""
        return -(-self.head_dim // 16) * 16


class Attention(Protocol):
    """An implementation of attention. `module` and `rest` are Any: each model has its own layers and arguments."""

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        """q [1, H, T, D], k [1, H_kv, T, D], v [1, H_kv, T, D_v] -> [1, T, H, D_v]."""


_running: ContextVar[Attention] = ContextVar("running")


@contextmanager
def running(attention: Attention) -> Iterator[None]:
    """Use this implementation for every attention call inside the context."""
    token = _running.set(attention)
    try:
        yield
    finally:
        _running.reset(token)


def register() -> None:
    """Register both names with Transformers. Repeatable."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (PAGED, EXAMINED):
        AttentionInterface.register(name, _attend)
    # PAGED has no mask function, so Transformers makes no masks for it.
    AttentionMaskInterface.register(EXAMINED, _mask)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **rest: Any
) -> tuple[torch.Tensor, None]:
    """The attention function, with the signature that Transformers expects."""
    return _running.get().attend(module, query, key, value, attention_mask=attention_mask, **rest), None


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: Any, **rest: Any
) -> torch.Tensor:
    """The mask function, with the signature that Transformers expects. Fills the mask with the width of its window."""
    probe = _running.get()
    assert isinstance(probe, AttentionProbe)
    try:
        width = probe.width_of(mask_function)
    except UnsupportedAttention:
        width = NO_WINDOW
    return torch.full((batch_size, 1, q_length, kv_length), float(width), device=device)


@dataclass
class AttentionProbe:
    """Records the parameters of each attention call while a few tokens run. Masks are checked up to `max_model_len`."""

    dtype: torch.dtype
    max_model_len: int
    shapes: list[AttentionShape] = field(default_factory=list)

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        dropout: float = 0.0,
        **rest: Any,
    ) -> torch.Tensor:
        """Returns zeros. Raises UnsupportedAttention."""
        more = sorted(name for name, value in rest.items() if value is not None and name not in HARMLESS)
        if more:
            raise UnsupportedAttention(f"its attention takes {', '.join(more)}")
        widths = set() if attention_mask is None else set(attention_mask.flatten().tolist())
        if NO_WINDOW in widths:
            raise UnsupportedAttention(OTHER_MASKS)
        if not getattr(module, "is_causal", True) or not rest.get("is_causal", True) or attention_mask is None:
            raise UnsupportedAttention("its attention is not causal")
        window = int(sliding_window or 0)
        if widths != {float(self._in_effect(window))}:
            raise UnsupportedAttention("its attention has a mask of its own")
        heads, kv_heads, head_dim, value_dim = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        one_each = {part.shape[:3:2] for part in (q, k, v)} == {(1, q.shape[2])}  # one text, and a key for each query
        if heads % kv_heads or v.shape[1] != kv_heads or k.shape[3] != head_dim or value_dim > head_dim or not one_each:
            raise UnsupportedAttention(f"its heads are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}")
        if {q.dtype, k.dtype, v.dtype} != {self.dtype}:
            raise UnsupportedAttention(f"its attention is computed in {q.dtype}, not in {self.dtype}")
        scale = head_dim**-0.5 if scaling is None else float(scaling)
        if not scale > 0:
            raise UnsupportedAttention(f"its scores are scaled by {scale}")
        self.shapes.append(AttentionShape(heads, kv_heads, head_dim, value_dim, scale, self._in_effect(window)))
        return v.new_zeros((1, q.shape[2], heads, value_dim))

    def width_of(self, mask_function: Any) -> int:
        """The window of a mask, 0 for a causal mask. Raises UnsupportedAttention for any other mask."""
        last = self.max_model_len - 1
        keys = torch.arange(self.max_model_len)
        window = 0
        positions = {last, 0, 1, *(last * i // SAMPLED_POSITIONS for i in range(SAMPLED_POSITIONS))}
        for position in sorted((p for p in positions if p <= last), reverse=True):
            zero, query = torch.tensor(0), torch.tensor(position)
            seen = torch.as_tensor(mask_function(zero, zero, query, keys)).expand(len(keys)).nonzero().flatten()
            if position == last and len(seen):
                window = self._in_effect(last + 1 - int(seen[0]))
            first = max(0, position + 1 - window) if window else 0
            if not torch.equal(seen, keys[first : position + 1]):
                raise UnsupportedAttention(OTHER_MASKS)
        return window

    def _in_effect(self, window: int) -> int:
        return window if window < self.max_model_len else 0


class AttentionRecorder:
    """Keeps the queries, keys and values of each call, and returns zeros."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        self.given += [q, k, v]
        return v.new_zeros((1, q.shape[2], q.shape[1], v.shape[3]))


class PagedAttention:
    """The attention of one step. Calls come in the order in which they were recorded."""

    def __init__(
        self,
        ops: Ops,
        shapes: list[AttentionShape],
        batch: ForwardBatch,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        identity: torch.Tensor,
    ) -> None:
        """identity [1, D]: cosines and sines of the identity, as wide as the cache: models apply RoPE themselves."""
        self._ops, self._calls, self._identity = ops, iter(zip(shapes, caches, strict=True)), identity
        self._slots = batch.slot_mapping
        self._nowhere = torch.zeros_like(batch.positions)
        self._tables = batch.block_tables, batch.seq_lens, batch.query_start_loc
        self._plan = ops.plan_attention(*self._tables)

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        shape, caches = next(self._calls)
        tokens, width = q.shape[2], shape.cache_dim
        padded = [part if part.shape[3] == width else F.pad(part, (0, width - part.shape[3])) for part in (q, k, v)]
        qkv = torch.cat([part[0].transpose(0, 1) for part in padded], dim=1).view(tokens, -1)  # [T, H + 2 H_kv, D]
        heads = shape.num_heads, shape.num_kv_heads
        rotated = self._ops.rope_and_cache(qkv, self._nowhere, self._identity, self._slots, *caches, *heads)
        where = self._tables
        mixed = self._ops.paged_attention(rotated, *caches, *where, shape.scale, shape.sliding_window, plan=self._plan)
        return mixed.view(1, tokens, shape.num_heads, width)[..., : shape.value_dim]

    def check_all_called(self) -> None:
        """Raise RuntimeError if there were fewer calls than recorded: then some have used caches of other layers."""
        if next(self._calls, None) is not None:
            raise RuntimeError("the model has left out an attention call")
