"""Attention of sequences with several queries: over cached blocks, or over the keys and values of this step.

A tile of queries is consecutive tokens times the query heads of a group, so that a key is loaded once for all of them.
The loop over keys ends at the last key that a row of the tile sees. Only tiles of keys on the diagonal, or at the edge
of the window, are masked. Cached and fresh keys are two compilations of one kernel, not two branches of one
compilation.

If a step has few tiles, several programs share the cached keys of one tile (see `prefill_plan`). Each writes a partial
result, as in `decode`, and the kernel that sums the chunks of decode rows sums these, too.

The shape of a step allows many more pieces of work than most steps have, so a program computes one after the other,
and their number is read from the plan on the device.

In the batch-invariant mode tiles of keys begin at multiples of their size, also at the start of a window. Without a
window, pieces of keys are summed separately, as chunks are in `decode`. So the bits of a row depend neither on the
other rows of its tile nor on the kernel that computes it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.decode import sum_chunks
from quire.kernels.gpu.decode_plan import FIELDS
from quire.kernels.gpu.online_softmax import (
    cap_scales,
    computes_in_float16,
    fold,
    load_tile,
    merge,
    normaliser,
    page_rows,
    to_float16,
)
from quire.kernels.gpu.prefill_plan import CACHED, PrefillPlan
from quire.kernels.gpu.tile_sizes import AttentionTiles, dot_precision, power_of_2


@triton.jit
def _fold_all(
    first, last, most, total, mixed, lowest, end, queries, keys, values, table, position, seen_last, window, scale,
    cap_scale, block_stride, row_stride, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Fold the tiles of keys that begin in [first, last). MASKED: keys outside [lowest, end) are not read.

    position, seen_last [ROWS]: of the queries, and of the last keys that they see.
    """
    for start in tl.range(first, last, KEYS):
        token = start + tl.arange(0, KEYS)
        inside = token < end
        if WINDOW:
            inside &= token >= lowest
        if PAGED:
            at = page_rows(table, token, inside, block_stride, D, BLOCK_SIZE, MASKED)
        else:
            at = token.to(tl.int64) * row_stride
        k = load_tile(keys, at, inside, D, PADDED_D, MASKED, True)
        v = load_tile(values, at, inside, D, PADDED_D, MASKED, False)
        seen = (token[None, :] <= seen_last[:, None]) & inside[None, :]
        if WINDOW:
            seen &= token[None, :] > position[:, None] - window
        most, total, mixed = fold(
            queries, k, v, seen, most, total, mixed, scale, cap_scale, MASKED, CAPPED, PRECISION, HALF
        )
    return most, total, mixed


@triton.jit
def _compute_item(
    item, kv_head, q, k, v, block_tables, seq_lens, query_start, out, partial, partial_weights, sinks, key_ends,
    table_width, row_stride, window, scale, cap_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    PIECE: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, ENDS: tl.constexpr,
    PRECISION: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute the query heads of one key-value head for an item of a PrefillPlan. Arguments: see `prefill_kernel`."""
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    s, first = tl.load(item), tl.load(item + 1)
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    context = tl.load(seq_lens + s) - (end - begin)

    row = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_D)
    query = first + row // GROUP
    exists = (row < BLOCK_Q * GROUP) & (query < end - begin)
    position = context + query
    at = (begin + query).to(tl.int64) * (HEADS * D) + (kv_head * GROUP + row % GROUP) * D
    mine = exists[:, None] & (d < D)[None, :]
    queries = tl.load(q + at[:, None] + d[None, :], mask=mine, other=0.0)
    if HALF:
        queries, inverse = to_float16(queries)
        if CAPPED:
            cap_scale *= inverse
        else:
            scale *= inverse

    table = block_tables + s.to(tl.int64) * table_width
    if PAGED:
        block_stride = KV_HEADS * BLOCK_SIZE * D
        keys, values = k + kv_head * (BLOCK_SIZE * D), v + kv_head * (BLOCK_SIZE * D)
    else:
        block_stride = 0
        keys = k + begin.to(tl.int64) * row_stride + kv_head * D
        values = v + begin.to(tl.int64) * row_stride + kv_head * D

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_D], tl.float32)
    # Keys:   low ............. inner ............. diagonal ............. stop
    # seen by: some (window)     all rows            some (causal)          none
    # A chunk begins a multiple of KEYS after `low`, and ends before such a multiple or at `stop`.
    stop = context + tl.minimum(first + BLOCK_Q, end - begin)
    seen_last = position
    if ENDS:
        seen_last = tl.load(key_ends + begin + query, mask=exists, other=0) - 1
        stop = tl.max(seen_last, axis=0) + 1
    chunk, chunk_end = 0, stop
    if SPLIT:
        chunk, chunk_end = tl.load(item + 2), tl.load(item + 3)
        if not WINDOW:
            # Positions relative to the first key of the chunk, where a block begins: the loops begin at the constant 0,
            # so that they compile as without chunks.
            table += chunk // BLOCK_SIZE
            context, position, stop, chunk_end = context - chunk, position - chunk, stop - chunk, chunk_end - chunk
            chunk, seen_last = 0, position
    lowest = 0
    inner = 0
    if WINDOW:
        lowest = tl.maximum(context + first - window + 1, 0)
        low = lowest // KEYS * KEYS if ALIGNED else lowest
        inner = tl.minimum(low + tl.cdiv(tl.maximum(stop - window - low, 0), KEYS) * KEYS, stop)
        most, total, mixed = _fold_all(
            tl.maximum(low, chunk), tl.minimum(inner, chunk_end), most, total, mixed, lowest, stop, queries, keys,
            values, table, position, seen_last, window, scale, cap_scale, block_stride, row_stride, D, PADDED_D,
            BLOCK_SIZE, KEYS, PAGED, WINDOW, True, CAPPED, PRECISION, HALF,
        )  # fmt: skip
    diagonal = inner + tl.maximum(context + first + 1 - inner, 0) // KEYS * KEYS
    if PIECE:
        for piece in tl.range(0, stop, PIECE):
            piece_most = tl.full([ROWS], float("-inf"), tl.float32)
            piece_total = tl.zeros([ROWS], tl.float32)
            piece_mixed = tl.zeros([ROWS, PADDED_D], tl.float32)
            piece_end = tl.minimum(piece + PIECE, stop)
            whole = tl.maximum(tl.minimum(diagonal, piece_end), piece)
            piece_most, piece_total, piece_mixed = _fold_all(
                piece, whole, piece_most, piece_total, piece_mixed, lowest, stop, queries, keys, values, table,
                position, seen_last, window, scale, cap_scale, block_stride, row_stride, D, PADDED_D, BLOCK_SIZE, KEYS,
                PAGED, WINDOW, False, CAPPED, PRECISION, HALF,
            )  # fmt: skip
            piece_most, piece_total, piece_mixed = _fold_all(
                whole, piece_end, piece_most, piece_total, piece_mixed, lowest, stop, queries, keys, values, table,
                position, seen_last, window, scale, cap_scale, block_stride, row_stride, D, PADDED_D, BLOCK_SIZE, KEYS,
                PAGED, WINDOW, True, CAPPED, PRECISION, HALF,
            )  # fmt: skip
            most, total, mixed = merge(most, total, mixed, piece_most, piece_total, piece_mixed)
    else:
        most, total, mixed = _fold_all(
            tl.maximum(inner, chunk), tl.minimum(diagonal, chunk_end), most, total, mixed, lowest, stop, queries, keys,
            values, table, position, seen_last, window, scale, cap_scale, block_stride, row_stride, D, PADDED_D,
            BLOCK_SIZE, KEYS, PAGED, WINDOW, False, CAPPED, PRECISION, HALF,
        )  # fmt: skip
        most, total, mixed = _fold_all(
            tl.maximum(diagonal, chunk), chunk_end, most, total, mixed, lowest, stop, queries, keys, values, table,
            position, seen_last, window, scale, cap_scale, block_stride, row_stride, D, PADDED_D, BLOCK_SIZE, KEYS,
            PAGED, WINDOW, True, CAPPED, PRECISION, HALF,
        )  # fmt: skip

    head = kv_head * GROUP + row % GROUP
    slot = -1
    if SPLIT:
        slot = tl.load(item + 4)
    if slot < 0:
        result = mixed * normaliser(most, total, sinks, head, exists, SINKS)[:, None]
        tl.store(out + at[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=mine)
    else:
        place = (slot + row // GROUP * tl.load(item + 5)).to(tl.int64) * HEADS + head
        tl.store(partial + place[:, None] * D + d[None, :], mixed, mask=mine)
        tl.store(partial_weights + place * 2, most, mask=exists)
        tl.store(partial_weights + place * 2 + 1, total, mask=exists)


# The lists of a plan are parts of one tensor, at any alignment: each alignment would be a compilation of its own.
@triton.jit(do_not_specialize=["table_width", "window"], do_not_specialize_on_alignment=["items", "order", "counts"])
def prefill_kernel(
    q, k, v, block_tables, seq_lens, query_start, items, order, counts, out, partial, partial_weights, sinks, key_ends,
    table_width, row_stride, window, scale, cap_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    PIECE: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, ENDS: tl.constexpr,
    PRECISION: tl.constexpr, FIELDS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute out [T, KV_HEADS * GROUP, D] from q of the same shape; items, order, counts: one list of a PrefillPlan.

    PAGED: k, v are caches [blocks, KV_HEADS, BLOCK_SIZE, D]. Otherwise they begin with token 0 of the step, a token is
    row_stride elements after the previous one, and its heads are contiguous.
    scale, cap_scale, CAPPED: see `fold`; sinks, SINKS: see `normaliser`; HALF: see `to_float16`.
    ALIGNED: tiles of keys begin at multiples of their size, also at the start of a window. PIECE: keys that are summed
    separately, a multiple of KEYS, without a window only; 0: all keys together.
    SPLIT: an item may be a chunk of the keys of a tile, neither with ALIGNED nor with PIECE. The result of a chunk
    is written to partial and partial_weights, as by `decode_kernel`.
    ENDS: queries see the keys that key_ends says, as in `Ops.paged_attention`; not with SPLIT.
    grid (programs,): the work is the items with most keys first, all heads of an item together. A round is one head of
    an item for each program. Odd rounds are in reverse order, so that programs compute about equal numbers of keys.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    work = tl.load(counts) * KV_HEADS
    backwards = programs - 1 - program
    rounds = work // programs
    rounds += tl.where(rounds % 2 == 0, program, backwards) < work % programs
    # Values that do not change between pieces of work are computed again, because registers are scarce.
    for turn in tl.range(0, rounds, disable_licm=True):
        index = turn * programs + tl.where(turn % 2 == 0, program, backwards)
        _compute_item(
            items + tl.load(order + index // KV_HEADS) * FIELDS, index % KV_HEADS, q, k, v, block_tables, seq_lens,
            query_start, out, partial, partial_weights, sinks, key_ends, table_width, row_stride, window, scale,
            cap_scale, KV_HEADS, GROUP, D, PADDED_D, BLOCK_SIZE, ROWS, KEYS, PAGED, WINDOW, ALIGNED, PIECE, SPLIT,
            CAPPED, SINKS, ENDS, PRECISION, HALF,
        )  # fmt: skip


def num_programs(full: int, most: int, resident: int) -> int:
    """Return the size of the grid of prefill, which follows from shapes alone.

    full: pieces of work if all tokens are of one prompt; most: pieces of work that a step of this shape may have;
    resident: programs that the device holds at a time.

    Few steps have as many tiles as `most`, with a partial tile for each sequence and with chunks. Programs without work
    take time, so there are as many as the tokens fill tiles. If these are fewer than the device holds, a loop of each
    program is enough. If they are more, the device starts the next program where one ends.
    """
    return max(1, min(most, max(full, resident)))


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    plan: PrefillPlan,
    kind: int,
    out: Tensor,
    tiles: AttentionTiles,
    scale: float,
    window: int,
    multiprocessors: int,
    aligned: bool = False,
    piece: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    key_ends: Tensor | None = None,
) -> None:
    """Compute the rows of out [T, H, D] that list `kind` (CACHED or FRESH) of the plan names.

    k and v: caches, or [T, H_kv, D] with contiguous heads and any stride between tokens. scale: of the scores, in base
    2. aligned, piece: see `prefill_kernel`.
    """
    scale, cap_scale = cap_scales(scale, softcap)
    _, heads, d = q.shape
    paged = k.dim() == 4
    kv_heads = k.shape[1]
    split = kind == CACHED and plan.rows is not None
    assert not (split and (aligned or piece)), "the bits of a row depend on the chunks of its keys"
    assert key_ends is None or not split, "chunks of keys end where the positions of the tile do"
    partials = plan.partials if split else 0
    partial = torch.empty((partials, heads, d), dtype=torch.float32, device=q.device)
    partial_weights = torch.empty((partials, heads, 2), dtype=torch.float32, device=q.device)
    block_q = tiles.rows // (heads // kv_heads)
    programs = num_programs(len(q) // block_q * kv_heads, plan.bounds[kind] * kv_heads, multiprocessors * tiles.per_sm)
    prefill_kernel[(programs,)](
        q, k, v, block_tables, seq_lens, query_start, plan.items[kind], plan.order[kind], plan.counts[kind:], out,
        partial, partial_weights, q if sinks is None else sinks,
        query_start if key_ends is None else key_ends, block_tables.shape[1], 0 if paged else k.stride(0), window,
        scale, cap_scale,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=d, PADDED_D=power_of_2(d),
        BLOCK_SIZE=k.shape[2] if paged else 1, ROWS=tiles.rows, KEYS=tiles.keys, PAGED=paged, WINDOW=window > 0,
        ALIGNED=aligned, PIECE=piece, SPLIT=split, CAPPED=softcap > 0, SINKS=sinks is not None,
        ENDS=key_ends is not None, PRECISION=dot_precision(q.dtype), FIELDS=FIELDS,
        HALF=computes_in_float16(q.dtype, k.dtype, d),
        num_warps=tiles.warps, num_stages=tiles.paged_stages if paged else tiles.stages,
    )  # fmt: skip
    if split:
        assert plan.rows is not None
        count = plan.counts[-1:]
        sum_chunks(plan.rows, count, partial, partial_weights, out, multiprocessors, sinks)
