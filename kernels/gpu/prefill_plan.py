"""The work lists of prefill, made once per step on the device and used by all layers.

An item is a tile of queries of one sequence. Sequences with keys in the cache and sequences that begin with this step
have separate lists, because different kernels compute them. Planning does not wait for the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.search import owner

CACHED, FRESH = 0, 1


@dataclass(frozen=True)
class PrefillPlan:
    """Work lists: entry CACHED of each tensor, and entry FRESH if fresh sequences have a kernel of their own."""

    tiles: Tensor  # [kinds, bound, 2] int32: sequence, its first query
    work: Tensor  # [kinds, bound] int32: keys of the tile; -1: the tile does not exist
    order: Tensor  # [kinds, bound] int64: tiles by descending number of keys, for a short tail
    bound: int  # upper bound of the number of tiles in a list


@triton.jit(do_not_specialize=["sequences", "longest"])
def plan_sequences_kernel(
    seq_lens, query_start, starts, sequences, longest, BLOCK_Q: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Fill starts [kinds, sequences + 1] int32: the tiles before each sequence, and the total. grid (kinds,)."""
    kind = tl.program_id(0)
    before = 0
    for first in range(0, sequences, BLOCK):
        s = first + tl.arange(0, BLOCK)
        inside = s < sequences
        queries = tl.load(query_start + s + 1, mask=inside, other=0) - tl.load(query_start + s, mask=inside, other=0)
        length = tl.load(seq_lens + s, mask=inside, other=0)
        mine = queries > longest
        if SPLIT:
            mine &= (queries == length) == (kind == 1)
        tiles = tl.where(mine, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)
        tl.store(starts + kind * (sequences + 1) + s, before + tl.cumsum(tiles, axis=0) - tiles, mask=inside)
        before += tl.sum(tiles, axis=0)
    tl.store(starts + kind * (sequences + 1) + sequences, before)


@triton.jit(do_not_specialize=["sequences", "steps", "window", "capacity", "bound"])
def plan_tiles_kernel(
    seq_lens, query_start, starts, tiles, work, sequences, steps, window, capacity, bound,
    BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill `tiles` and `work` of a PrefillPlan. grid (cdiv(bound, BLOCK), kinds)."""
    kind = tl.program_id(1)
    starts += kind * (sequences + 1)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < bound
    exists = item < tl.load(starts + sequences)
    s = owner(starts, item, sequences, steps, 1)
    first = (item - tl.load(starts + s)) * BLOCK_Q
    queries = tl.load(query_start + s + 1) - tl.load(query_start + s)
    context = tl.minimum(tl.load(seq_lens + s), capacity) - queries
    keys = context + tl.minimum(first + BLOCK_Q, queries)
    keys -= tl.where(window > 0, tl.maximum(context + first - window + 1, 0), 0)
    at = tiles + (kind * bound + item) * 2
    tl.store(at, s, mask=inside & exists)
    tl.store(at + 1, first, mask=inside & exists)
    # A context that is shorter than its queries, or longer than the table, is an error of the caller: it is skipped.
    tl.store(work + kind * bound + item, tl.where(exists & (context >= 0), keys, -1), mask=inside)


def plan_prefill(
    seq_lens: Tensor,
    query_start: Tensor,
    tokens: int,
    capacity: int,
    window: int,
    longest: int,
    block_q: int,
    split: bool,
) -> PrefillPlan:
    """Plan the prefill of one step, for layers with this window.

    seq_lens [S], query_start [S + 1] int32. tokens: of the step. capacity: keys that a row of the block table has room
    for. longest: only sequences with more queries than this are computed. block_q: queries per tile. split: make two
    lists, CACHED and FRESH.
    """
    sequences, device = seq_lens.shape[0], seq_lens.device
    kinds = 2 if split else 1
    # Every tile but the last of a sequence is full, and a sequence of prefill has more than `longest` queries.
    bound = tokens // block_q + min(sequences, tokens // (longest + 1))
    starts = torch.empty((kinds, sequences + 1), dtype=torch.int32, device=device)
    tiles = torch.empty((kinds, bound, 2), dtype=torch.int32, device=device)
    work = torch.empty((kinds, bound), dtype=torch.int32, device=device)
    plan_sequences_kernel[(kinds,)](
        seq_lens, query_start, starts, sequences, longest, BLOCK_Q=block_q, SPLIT=split, BLOCK=512
    )
    plan_tiles_kernel[(triton.cdiv(bound, 256), kinds)](
        seq_lens, query_start, starts, tiles, work, sequences, sequences.bit_length(), window, capacity, bound,
        BLOCK_Q=block_q, BLOCK=256,
    )  # fmt: skip
    return PrefillPlan(tiles, work, work.argsort(dim=-1, descending=True), bound)
