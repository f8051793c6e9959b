"""Attention of one step: which tokens go to which kernel, planned at the first layer and kept for the others.

A step of as many tokens as sequences is decoding: every token is a row of `decode`. In any other step sequences with
one query are rows, and the others are tiles of `prefill`, in a launch of their own; those that begin with this step may
be handed their keys and values directly. Which is which is decided on the device.

In the batch-invariant mode a row has the same bits from both: tiles of keys and the pieces that are summed up lie where
they lie in the context, whatever else is in the step. With a window all rows go through `prefill`, in one piece, and so
does float32, in which two tiles of this size are more than the registers hold.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from quire.kernels.gpu.decode import decode
from quire.kernels.gpu.decode_plan import DecodePlan, plan_decode
from quire.kernels.gpu.prefill import prefill
from quire.kernels.gpu.prefill_plan import CACHED, FRESH, PrefillPlan, plan_prefill
from quire.kernels.gpu.tiles import INVARIANT_PIECE, Tiles, decode_tiles, invariant_tiles, prefill_tiles

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Device:
    """What the launches depend on beside shapes."""

    multiprocessors: int
    invariant: bool = False  # the bits of a row depend on that row alone
    k_scale: float = 1.0  # a cached key times this is the key
    v_scale: float = 1.0
    roomy: bool = True  # has as much shared memory as the largest tiles need


class LayerAttention(NamedTuple):
    """Of one layer: q, out [T, H, D]; caches [blocks, H_kv, block size, D]; scale: of the scores, in base 2."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scale: float
    window: int
    out: Tensor

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[1]


@dataclass
class AttentionPlan:
    """block_tables, seq_lens, query_start_loc as in kernels/ops.py; split: fresh sequences bring their keys along."""

    device: Device
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    split: bool = False
    _decode: dict[tuple, DecodePlan] = field(default_factory=dict)
    _prefill: dict[tuple, PrefillPlan] = field(default_factory=dict)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int,
        out: Tensor,
        fresh: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """q, out [T, H, D]. fresh: k and v [T, H_kv, D] of this step, with `split` only."""
        tokens, _, d = q.shape
        if tokens == 0 or len(self.seq_lens) == 0:
            return
        only_rows = tokens <= len(self.seq_lens)
        call = LayerAttention(q, k_cache, v_cache, scale * LOG2_E, window, out)
        shape = d, call.group, q.dtype
        if not self.device.invariant:
            self._rows(call, decode_tiles(*shape), 0, only_rows)
            if not only_rows:
                self._prompts(call, prefill_tiles(*shape, window, self.device.roomy), 0, 1, fresh)
            return
        of_rows, of_prompts = invariant_tiles(*shape, window, self.device.roomy)
        piece = 0 if window else INVARIANT_PIECE
        if window or q.dtype.itemsize == 4:
            self._prompts(call, of_rows if only_rows and call.group <= of_rows.rows else of_prompts, piece, 0)
            return
        self._rows(call, of_rows, piece, only_rows)
        if not only_rows:
            self._prompts(call, of_prompts, piece, 1)

    def _rows(self, call: LayerAttention, tiles: Tiles, piece: int, each_token: bool) -> None:
        """Every token, or the sequences with one query."""
        device, kv_heads = self.device, call.k_cache.shape[1]
        lengths = self._lengths(call)
        key = (*lengths[2:], kv_heads, tiles)
        if (plan := self._decode.get(key)) is None:
            plan = plan_decode(*lengths, each_token, tiles, kv_heads, device.multiprocessors, piece)
            self._decode[key] = plan
        where = call.k_cache, call.v_cache, self.block_tables, plan
        scales = call.scale * device.k_scale, device.v_scale
        decode(call.q, *where, call.out, tiles, *scales, device.multiprocessors)

    def _prompts(
        self, call: LayerAttention, tiles: Tiles, piece: int, longest: int, fresh: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Sequences with more queries than `longest`."""
        device, lengths = self.device, self._lengths(call)
        split = self.split and not device.invariant  # one kernel for all
        key = (*lengths[2:], call.group, tiles)
        if (plan := self._prefill.get(key)) is None:
            plan = self._prefill[key] = plan_prefill(*lengths, longest, tiles.rows // call.group, split)
        where = self.block_tables, self.seq_lens, self.query_start, plan
        paged = call.k_cache, call.v_cache, *where, CACHED, call.out, tiles
        prefill(call.q, *paged, call.scale * device.k_scale, device.v_scale, call.window, device.invariant, piece)
        if split:
            assert fresh is not None
            prefill(call.q, *fresh, *where, FRESH, call.out, tiles, call.scale, 1.0, call.window)

    def _lengths(self, call: LayerAttention) -> tuple[Tensor, Tensor, int, int, int]:
        """What a plan is made of. The host knows the last three: tokens, keys that a table has room for, the window."""
        capacity = self.block_tables.shape[1] * call.k_cache.shape[2]
        return self.seq_lens, self.query_start, len(call.q), capacity, call.window
