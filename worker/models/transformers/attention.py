"""Paged attention for models that Transformers computes, in place of its own attention.

Transformers calls an attention function that is registered by name, once per layer. Two are registered here. `paged`
computes a step. `examined` computes nothing: it records the parameters of each call, so that a model that needs more
than paged attention offers, such as indices of keys, is refused before it serves a request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from quire.kernels.ops import Ops
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.transformers.attention_chunks import Tables, tables_in_chunks
from quire.worker.models.transformers.fused_rotary import RotationTables, joined_rows
from quire.worker.models.transformers.query_scales import scaled
from quire.worker.models.transformers.shapes import AttentionShape

PAGED, EXAMINED = "quire_paged", "quire_examined"
# Arguments of layers that do not change their attention.
OUTPUTS = {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"}
HARMLESS = OUTPUTS | {"position_ids", "use_cache", "is_causal"}
# Number of positions whose masks are checked, besides the first and the last ones.
SAMPLED_POSITIONS = 16
# Sentinel width: the mask is not a sliding window. Some models make such masks, and no layer uses them.
NO_WINDOW, OTHER_MASKS = -1, "its masks are neither causal nor those of a window or of chunks"


class UnsupportedAttention(Exception):
    """A layer needs an attention that is not supported. The message names the unsupported property."""


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
    """Compute attention, with the signature that Transformers expects."""
    return _running.get().attend(module, query, key, value, attention_mask=attention_mask, **rest), None


def attend_causal(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0
) -> torch.Tensor:
    """Run the attention of a layer that is known to be causal, or of a sliding window. Returns [1, T, H, D_v]."""
    current = _running.get()
    mask = None
    if isinstance(current, AttentionProbe):
        mask = torch.full((1, 1, q.shape[2], q.shape[2]), float(current._in_effect(window)))
    return current.attend(module, q, k, v, attention_mask=mask, scaling=scale, sliding_window=window or None)


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: Any, **rest: Any
) -> torch.Tensor:
    """Return a mask filled with the width of its window, with the signature that Transformers expects."""
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
    modules: list[Any] = field(default_factory=list)  # of each call
    _keys_values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of each call

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
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """Return zeros. s_aux: the sinks of the heads. Raises UnsupportedAttention."""
        given = {name for name, value in rest.items() if value is not None and name not in HARMLESS}
        more = sorted(name for name in given if not _is_empty(rest[name]))
        if more:
            raise UnsupportedAttention(f"its attention takes {', '.join(more)}")
        widths: set[float] = set() if attention_mask is None else set(attention_mask.flatten().tolist())
        chunk = -int(min(widths, default=0)) if len(widths) == 1 and min(widths) < NO_WINDOW else 0
        if NO_WINDOW in widths:
            raise UnsupportedAttention(OTHER_MASKS)
        if not getattr(module, "is_causal", True) or not rest.get("is_causal", True) or attention_mask is None:
            raise UnsupportedAttention("its attention is not causal")
        window = int(sliding_window or 0)
        if widths != {float(-chunk if chunk and not window else self._in_effect(window))}:
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
        cap = 0.0 if softcap is None else float(softcap)
        if not 0 <= cap < math.inf:
            raise UnsupportedAttention(f"its scores have the cap {cap}")
        if s_aux is not None and s_aux.shape != (heads,):
            raise UnsupportedAttention(f"its sinks have the shape {tuple(s_aux.shape)}, not ({heads},)")
        window = self._in_effect(window)
        same = (call for call, (keys, values) in enumerate(self._keys_values) if keys is k and values is v)
        shared_with = next(same, None)
        shape = AttentionShape(
            heads, kv_heads, head_dim, value_dim, scale, window, cap, shared_with, chunk, s_aux is not None
        )
        self.shapes.append(shape)
        self._keys_values.append((k, v))
        self.modules.append(module)
        return v.new_zeros((1, q.shape[2], heads, value_dim))

    def width_of(self, mask_function: Any) -> int:
        """Return the window of a mask, 0 for a causal mask, and for a mask of chunks their size, negative.

        Raises UnsupportedAttention for any other mask.
        """
        last = self.max_model_len - 1
        keys = torch.arange(self.max_model_len)

        def seen_at(position: int) -> torch.Tensor:
            zero, query = torch.tensor(0), torch.tensor(position)
            return torch.as_tensor(mask_function(zero, zero, query, keys)).expand(len(keys)).nonzero().flatten()

        def is_right(positions: set[int], first_at: Callable[[int], int]) -> bool:
            known = sorted((p for p in positions if p <= last), reverse=True)
            return all(torch.equal(seen_at(p), keys[first_at(p) : p + 1]) for p in known)

        positions = {last, 0, 1, *(last * i // SAMPLED_POSITIONS for i in range(SAMPLED_POSITIONS))}
        at_end = seen_at(last)
        window = self._in_effect(last + 1 - int(at_end[0])) if len(at_end) else 0
        if is_right(positions | _edges(window), lambda p: max(0, p + 1 - window) if window else 0):
            return window
        # The first position that does not see the first token.
        chunk = bisect_left(range(self.max_model_len), 1, key=lambda p: int(not _is_first_in(seen_at(p))))
        if 1 < chunk <= last and is_right(positions | _edges(chunk), lambda p: p // chunk * chunk):
            return -chunk
        raise UnsupportedAttention(OTHER_MASKS)

    def _in_effect(self, window: int) -> int:
        return window if window < self.max_model_len else 0


def _is_empty(value: Any) -> bool:
    """Return whether these are indices of no keys (`sparse_attention.py`)."""
    return isinstance(value, torch.Tensor) and value.numel() == 0


def _edges(size: int) -> set[int]:
    """Return the positions where windows of this size differ from chunks of it."""
    return {n * size + more for n in (1, 2, 3) for more in (-1, 0, 1)} if size else set()


def _is_first_in(seen: torch.Tensor) -> bool:
    """Return whether the first token is among the tokens [n] that are seen."""
    return len(seen) > 0 and int(seen[0]) == 0


class AttentionRecorder:
    """Keeps the queries, keys and values of each call, and returns zeros."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        self.given += [q, k, v]
        return v.new_zeros((1, q.shape[2], q.shape[1], v.shape[3]))


def cache_of_call(shapes: list[AttentionShape]) -> list[int]:
    """Return the number of the cache of each call. Calls that share keys and values share a cache."""
    numbers: list[int] = []
    for shape in shapes:
        numbers.append(max(numbers, default=-1) + 1 if shape.shared_with is None else numbers[shape.shared_with])
    return numbers


def identity_rotations(shapes: list[AttentionShape], device: torch.device) -> dict[int, torch.Tensor]:
    """Return, for each width of a key in the cache, cosines and sines [1, width] of a rotation that changes nothing.

    Models apply RoPE themselves.
    """
    rotations = {}
    for width in {shape.cache_dim for shape in shapes if shape.latent is None}:
        rotations[width] = torch.zeros(1, width, device=device)
        rotations[width][:, : width // 2] = 1  # cosines, then sines
    return rotations


class PagedAttention:
    """The attention of one step. Calls come in the order in which they were recorded."""

    def __init__(
        self,
        ops: Ops,
        shapes: list[AttentionShape],
        batch: ForwardBatch,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        identities: dict[int, torch.Tensor],
        rotations: RotationTables,
    ) -> None:
        """caches: numbered as in `cache_of_call`. identities: of `identity_rotations`, for models that apply RoPE
        themselves. rotations: those that are left to this attention.
        """
        of_calls = [caches[number] for number in cache_of_call(shapes)]
        self._ops, self._calls, self._identities = ops, iter(zip(shapes, of_calls, strict=True)), identities
        self._batch, self._slots = batch, batch.slot_mapping
        self._nowhere = torch.zeros_like(batch.positions)
        self._rotations, self._rows = rotations, torch.arange(len(self._nowhere), dtype=torch.int32).to(self._nowhere)
        self._tables = batch.block_tables, batch.seq_lens, batch.query_start_loc
        self._plan = ops.plan_attention(*self._tables)
        self._chunked: dict[int, tuple[Tables, object]] = {}  # by the size of chunks

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s_aux: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        shape, caches = next(self._calls)
        q = scaled(module, q, self._batch.positions)
        if shape.latent is not None:
            mixed: torch.Tensor = module.latent_heads.attend(
                q, k, v, caches[0], self._batch, shape.scale, shape.sliding_window
            )
            return mixed
        tokens, width = q.shape[2], shape.cache_dim
        if shape.shared_with is None:
            given = [part if part.shape[3] == width else F.pad(part, (0, width - part.shape[3])) for part in (q, k, v)]
            table = self._rotations.table_for(module, q, k)
            at = (self._nowhere, self._identities[width]) if table is None else (self._rows, table)
            heads = shape.num_heads, shape.num_kv_heads
            queries = self._ops.rope_and_cache(joined_rows(*given), *at, self._slots, *caches, *heads)
        else:
            queries = F.pad(q[0], (0, width - q.shape[3])).transpose(0, 1).contiguous()
        tables, plan = self._tables_for(shape.chunk, caches[0].shape[2])
        mixed = self._ops.paged_attention(
            queries,
            *caches,
            *tables,
            shape.scale,
            shape.sliding_window,
            plan=plan,
            sinks=None if s_aux is None else s_aux.float(),
            softcap=shape.softcap,
        )
        return mixed.view(1, tokens, shape.num_heads, width)[..., : shape.value_dim]

    def _tables_for(self, chunk: int, block_size: int) -> tuple[Tables, object]:
        """Return the block tables, lengths and starts of queries for a call, and their plan."""
        if not chunk:
            return self._tables, self._plan
        if chunk not in self._chunked:
            tables = tables_in_chunks(self._tables, chunk, block_size)
            self._chunked[chunk] = tables, self._ops.plan_attention(*tables)
        return self._chunked[chunk]

    def check_all_called(self) -> None:
        """Raise RuntimeError if there were fewer calls than recorded: then some have used caches of other layers."""
        if next(self._calls, None) is not None:
            raise RuntimeError("the model has left out an attention call")
