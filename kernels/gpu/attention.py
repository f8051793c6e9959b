"""Attention of one step: which tokens go to which kernel, planned at the first layer and kept for the others.

A step of as many tokens as sequences is decoding: every token is a row of `decode`. In any other step sequences with
one query are rows, and the others are tiles of `prefill`, in a launch of their own; those that begin with this step may
be handed their keys and values directly. Which is which is decided on the device.
"""

import math
from dataclasses import dataclass, field

from torch import Tensor

from kernels.gpu.decode import decode
from kernels.gpu.decode_plan import DecodePlan, plan_decode
from kernels.gpu.prefill import prefill
from kernels.gpu.prefill_plan import CACHED, FRESH, PrefillPlan, plan_prefill
from kernels.gpu.tiles import decode_tiles, prefill_tiles

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Device:
    """What the launches depend on beside shapes."""

    multiprocessors: int
    invariant: bool = False  # all rows go through the kernel of prompts
    k_scale: float = 1.0  # a cached key times this is the key
    v_scale: float = 1.0


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
        _, kv_heads, block_size, _ = k_cache.shape
        capacity = self.block_tables.shape[1] * block_size
        only_rows = tokens <= len(self.seq_lens)
        group = heads // kv_heads
        base_2 = scale * LOG2_E
        k_scale, v_scale = self.device.k_scale, self.device.v_scale
        if self.device.invariant:
            tiles = prefill_tiles(d, group, q.dtype, window)
            key = (window, group, capacity, tokens, tiles)
            if (every := self._prefill.get(key)) is None:
                lengths = self.seq_lens, self.query_start, tokens, capacity, window
                every = self._prefill[key] = plan_prefill(*lengths, 0, tiles.rows // group, False)
            where = self.block_tables, self.seq_lens, self.query_start, every
            prefill(q, k_cache, v_cache, *where, CACHED, out, tiles, base_2 * k_scale, v_scale, window, aligned=True)
            return
        tiles = decode_tiles(d, group, q.dtype)
        key = (window, kv_heads, capacity, tokens, tiles)
        lengths = self.seq_lens, self.query_start, tokens, capacity, window
        if (plan := self._decode.get(key)) is None:
            rest = tiles, kv_heads, self.device.multiprocessors
            plan = self._decode[key] = plan_decode(*lengths, only_rows, *rest)
        caches = k_cache, v_cache, self.block_tables
        decode(q, *caches, plan, out, tiles, base_2 * k_scale, v_scale, self.device.multiprocessors)
        if only_rows:
            return
        tiles = prefill_tiles(d, group, q.dtype, window)
        key = (window, group, capacity, tokens, tiles)
        if (long := self._prefill.get(key)) is None:
            long = self._prefill[key] = plan_prefill(*lengths, 1, tiles.rows // group, self.split)
        where = self.block_tables, self.seq_lens, self.query_start, long
        prefill(q, k_cache, v_cache, *where, CACHED, out, tiles, base_2 * k_scale, v_scale, window)
        if self.split:
            assert fresh is not None
            prefill(q, *fresh, *where, FRESH, out, tiles, base_2, 1.0, window)
