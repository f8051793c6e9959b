"""Attention of one step: the kernel of each token, planned at the first layer and kept for later layers.

A step with as many tokens as sequences only decodes: every token is a row of `decode`. In any other step, sequences
with one query are rows of `decode`, and sequences with more queries are tiles of `prefill`, in a launch of their own.
Sequences that begin with this step may bring their keys and values along instead of reading them from the cache. The
device decides which sequence goes where, and whether several programs share the keys of a row of `decode` or of a
tile of `prefill` behind cached keys.

In the batch-invariant mode both kernels give a row the same bits: tiles of keys, and the pieces that are summed
separately, begin at fixed places of the context, whatever else is in the step. Programs do not share the
keys of a tile of `prefill` then. With a window all rows go through `prefill`, in one piece. So does float32: two
tiles of this size do not fit into the registers.

A kernel that gives wrong results on a device is replaced: `decode` and `prefill` by torch, and `fresh`, which computes
prompts from the keys that they bring along, by `prefill`. With `LaunchOptions.hopper_prefill`, the kernel `hopper`
computes those of them that it supports, and is replaced by `fresh`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from quire.kernels.gpu.decode import decode
from quire.kernels.gpu.decode_plan import DecodePlan, plan_decode
from quire.kernels.gpu.online_softmax import LOG2_E
from quire.kernels.gpu.prefill import prefill
from quire.kernels.gpu.prefill_plan import CACHED, FRESH, PrefillPlan, plan_prefill
from quire.kernels.gpu.tile_sizes import INVARIANT_PIECE, AttentionTiles, decode_tiles, invariant_tiles, prefill_tiles
from quire.kernels.gpu.torch_attention import attend_in_torch

# The kernels that may be replaced.
DECODE_KERNEL, PREFILL_KERNEL, FRESH_KERNEL, HOPPER_KERNEL = "decode", "prefill", "fresh", "hopper"


@dataclass(frozen=True)
class LaunchOptions:
    """The properties, apart from shapes, on which launches of attention depend."""

    multiprocessors: int
    invariant: bool = False  # the bits of a row depend on that row alone
    large_shared_memory: bool = True  # the device has as much shared memory as the largest tiles need
    dependent_launch: bool = False  # the device has programmatic dependent launch
    hopper_prefill: bool = False  # take the kernel of `hopper_prefill` where it is possible
    replaced: frozenset[str] = frozenset()  # kernels that are not launched

    @property
    def may_split(self) -> bool:
        """True if prompts that begin with a step may bring their keys and values along."""
        return not self.invariant and not self.replaced & {PREFILL_KERNEL, FRESH_KERNEL}


class LayerAttention(NamedTuple):
    """The attention of one layer. The scores are in base 2."""

    q: Tensor  # [T, H, D]
    k_cache: Tensor  # [blocks, H_kv, block_size, D]
    v_cache: Tensor
    scale: float
    window: int  # 0: none
    out: Tensor  # [T, H, D]
    sinks: Tensor | None  # [H]
    softcap: float  # 0: none
    key_ends: Tensor | None  # [T]

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.q.shape[1] // self.k_cache.shape[1]


@dataclass
class AttentionPlan:
    """The attention of all layers of one step: block tables and lengths as in `Ops.paged_attention`, and work lists.

    split: sequences that begin with this step bring their keys and values along. dependent: rows are decoded by
    dependent launches (`few_rows`). The work lists are made at the first layer that needs them. A layer with another
    window or another shape has lists of its own.
    """

    options: LaunchOptions
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    split: bool = False
    dependent: bool = False
    _decode: dict[tuple[object, ...], DecodePlan] = field(default_factory=dict)
    _prefill: dict[tuple[object, ...], PrefillPlan] = field(default_factory=dict)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int,
        out: Tensor,
        fresh: tuple[Tensor, Tensor] | None = None,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        key_ends: Tensor | None = None,
    ) -> None:
        """Compute the attention of one layer into `out`.

        q, out [T, H, D]. fresh: k and v [T, H_kv, D] of this step; required with `split`, and only then.
        sinks, softcap, key_ends: as in `Ops.paged_attention`.
        """
        tokens, _, d = q.shape
        if tokens == 0 or len(self.seq_lens) == 0:
            return
        options, only_rows = self.options, tokens <= len(self.seq_lens) and key_ends is None
        call = LayerAttention(q, k_cache, v_cache, scale * LOG2_E, window, out, sinks, softcap, key_ends)
        if not options.invariant:
            tiles = decode_tiles(d, call.group, q.dtype, options.large_shared_memory)
            self._attend_rows(call, tiles, 0, only_rows)
            if not only_rows:
                tiles = prefill_tiles(d, call.group, q.dtype, window, options.large_shared_memory)
                self._attend_prompts(call, tiles, 0, 1, fresh)
            return
        row_tiles, prompt_tiles = invariant_tiles(d, call.group, q.dtype, window, options.large_shared_memory)
        piece = 0 if window else INVARIANT_PIECE
        if window or q.dtype.itemsize == 4:
            fits = only_rows and call.group <= row_tiles.rows
            self._attend_prompts(call, row_tiles if fits else prompt_tiles, piece, 0)
            return
        self._attend_rows(call, row_tiles, piece, only_rows)
        if not only_rows:
            self._attend_prompts(call, prompt_tiles, piece, 1)

    def _attend_rows(self, call: LayerAttention, tiles: AttentionTiles, piece: int, each_token: bool) -> None:
        """Compute every token, or only the sequences with one query. piece: keys summed separately, 0: any number."""
        if DECODE_KERNEL in self.options.replaced:
            self._attend_in_torch(call, 1, None if each_token else 1)
            return
        kv_heads, multiprocessors = call.k_cache.shape[1], self.options.multiprocessors
        tokens, capacity = len(call.q), self._capacity(call)
        key = tokens, capacity, call.window, kv_heads, tiles
        if (plan := self._decode.get(key)) is None:
            plan = self._decode[key] = plan_decode(
                self.seq_lens,
                self.query_start,
                tokens=tokens,
                capacity=capacity,
                window=call.window,
                each_token=each_token,
                tiles=tiles,
                kv_heads=kv_heads,
                multiprocessors=multiprocessors,
                piece=piece,
            )
        decode(
            call.q, call.k_cache, call.v_cache, self.block_tables, plan, call.out, tiles, call.scale, multiprocessors,
            call.sinks, call.softcap, self.dependent,
        )  # fmt: skip

    def _attend_prompts(
        self,
        call: LayerAttention,
        tiles: AttentionTiles,
        piece: int,
        longest: int,
        fresh: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Compute the sequences with more queries than `longest`."""
        if PREFILL_KERNEL in self.options.replaced:
            self._attend_in_torch(call, longest + 1, None)
            return
        invariant, multiprocessors = self.options.invariant, self.options.multiprocessors
        split = self.split and self.options.may_split
        kv_heads = call.k_cache.shape[1]
        tokens, capacity = len(call.q), self._capacity(call)
        has_ends = call.key_ends is not None
        key = tokens, capacity, call.window, kv_heads, call.group, tiles, has_ends
        if (plan := self._prefill.get(key)) is None:
            plan = self._prefill[key] = plan_prefill(
                self.seq_lens,
                self.query_start,
                tokens=tokens,
                capacity=capacity,
                window=call.window,
                longest=longest,
                block_q=tiles.rows // call.group,
                split=split,
                # Keys are cut into chunks by the positions of queries.
                places=0 if invariant or has_ends else multiprocessors * tiles.per_sm // kv_heads,
                unit=max(tiles.keys, call.k_cache.shape[2]),
            )
        sequences = self.block_tables, self.seq_lens, self.query_start
        prefill(
            call.q, call.k_cache, call.v_cache, *sequences, plan, CACHED, call.out, tiles, call.scale, call.window,
            multiprocessors, aligned=invariant, piece=piece, sinks=call.sinks, softcap=call.softcap,
            key_ends=call.key_ends,
        )  # fmt: skip
        if split:
            assert fresh is not None
            if self._is_for_hopper(call, fresh, tiles):
                from quire.kernels.gpu.hopper_prefill import hopper_prefill  # Gluon, an experimental part of Triton

                hopper_prefill(call.q, *fresh, self.query_start, plan, call.out, call.scale, multiprocessors)
                return
            k, v = fresh
            prefill(
                call.q, k, v, *sequences, plan, FRESH, call.out, tiles, call.scale, call.window,
                multiprocessors, sinks=call.sinks, softcap=call.softcap, key_ends=call.key_ends,
            )  # fmt: skip

    def _is_for_hopper(self, call: LayerAttention, fresh: tuple[Tensor, Tensor], tiles: AttentionTiles) -> bool:
        """Return whether the kernel `hopper` computes prompts with their own keys: it knows the causal mask only."""
        is_off = not self.options.hopper_prefill or HOPPER_KERNEL in self.options.replaced
        if is_off or call.window or call.softcap or call.sinks is not None or call.key_ends is not None:
            return False
        from quire.kernels.gpu.hopper_prefill import supports

        return supports(call.q, fresh, tiles.rows)

    def _attend_in_torch(self, call: LayerAttention, least: int, most: int | None) -> None:
        """Compute the sequences that have `least` to `most` queries."""
        tables = self.block_tables, self.seq_lens, self.query_start
        attend_in_torch(call, call.scale / LOG2_E, *tables, least, most)

    def _capacity(self, call: LayerAttention) -> int:
        """Return the number of keys that a row of the block table has room for."""
        return self.block_tables.shape[1] * call.k_cache.shape[2]
