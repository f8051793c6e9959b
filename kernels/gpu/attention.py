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

from torch import Tensor

from kernels.gpu.decode import decode
from kernels.gpu.decode_plan import DecodePlan, plan_decode
from kernels.gpu.prefill import prefill
from kernels.gpu.prefill_plan import CACHED, FRESH, PrefillPlan, plan_prefill
from kernels.gpu.tiles import INVARIANT_PIECE, Tiles, decode_tiles, invariant_tiles, prefill_tiles

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Device:
    """What the launches depend on beside shapes."""

    multiprocessors: int
    invariant: bool = False  # the bits of a row depend on that row alone
    k_scale: float = 1.0  # a cached key times this is the key
    v_scale: float = 1.0
    roomy: bool = True  # has as much shared memory as the largest tiles need


@dataclass
class Step:
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
        tokens, heads, d = q.shape
        if tokens == 0 or len(self.seq_lens) == 0:
            return
        only_rows = tokens <= len(self.seq_lens)
        group = heads // k_cache.shape[1]
        rest = k_cache, v_cache, scale * LOG2_E, window, out
        if not self.device.invariant:
            self._rows(q, decode_tiles(d, group, q.dtype), 0, only_rows, *rest)
            if not only_rows:
                self._prompts(q, prefill_tiles(d, group, q.dtype, window, self.device.roomy), 0, 1, *rest, fresh)
            return
        of_rows, of_prompts = invariant_tiles(d, group, q.dtype, window, self.device.roomy)
        piece = 0 if window else INVARIANT_PIECE
        if window or q.dtype.itemsize == 4:
            self._prompts(q, of_rows if only_rows and group <= of_rows.rows else of_prompts, piece, 0, *rest)
            return
        self._rows(q, of_rows, piece, only_rows, *rest)
        if not only_rows:
            self._prompts(q, of_prompts, piece, 1, *rest)

    def _rows(
        self,
        q: Tensor,
        tiles: Tiles,
        piece: int,
        each_token: bool,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int,
        out: Tensor,
    ) -> None:
        device, kv_heads = self.device, k_cache.shape[1]
        capacity = self.block_tables.shape[1] * k_cache.shape[2]
        key = (window, kv_heads, capacity, len(q), tiles)
        if (plan := self._decode.get(key)) is None:
            lengths = self.seq_lens, self.query_start, len(q), capacity, window
            plan = plan_decode(*lengths, each_token, tiles, kv_heads, device.multiprocessors, piece)
            self._decode[key] = plan
        where = k_cache, v_cache, self.block_tables, plan
        decode(q, *where, out, tiles, scale * device.k_scale, device.v_scale, device.multiprocessors)

    def _prompts(
        self,
        q: Tensor,
        tiles: Tiles,
        piece: int,
        longest: int,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int,
        out: Tensor,
        fresh: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Sequences with more queries than `longest`."""
        device, group = self.device, q.shape[1] // k_cache.shape[1]
        split = self.split and not device.invariant  # one kernel for all
        capacity = self.block_tables.shape[1] * k_cache.shape[2]
        key = (window, group, capacity, len(q), tiles)
        if (plan := self._prefill.get(key)) is None:
            lengths = self.seq_lens, self.query_start, len(q), capacity, window
            plan = self._prefill[key] = plan_prefill(*lengths, longest, tiles.rows // group, split)
        where = self.block_tables, self.seq_lens, self.query_start, plan
        scales = scale * device.k_scale, device.v_scale
        prefill(q, k_cache, v_cache, *where, CACHED, out, tiles, *scales, window, device.invariant, piece)
        if split:
            assert fresh is not None
            prefill(q, *fresh, *where, FRESH, out, tiles, scale, 1.0, window)
