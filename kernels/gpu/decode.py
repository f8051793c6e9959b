"""Attention of decode rows: a persistent grid over the chunks of a plan, and a sum over the chunks of a row.

The query heads of a group are one tile of at least 16 rows, so that keys are loaded once for the group and multiplied
by matrix instructions; the padding costs nothing, since the cache's bandwidth sets the pace.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.decode_plan import FIELDS, DecodePlan
from kernels.gpu.tile import fold, load_tile, page_rows
from kernels.gpu.tiles import Tiles, dot_precision, power_of_2


@triton.jit(do_not_specialize=["table_width"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    items,
    counts,
    out,
    partial,
    partial_log,
    table_width,
    scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q, out [T, KV_HEADS * GROUP, D]; caches [blocks, KV_HEADS, BLOCK_SIZE, D]; items, counts of a DecodePlan.

    A row of one chunk goes to out; others leave normalised values in partial [slots, heads, D] and the base-2 logarithm
    of their weight in partial_log [slots, heads], both float32. scale includes log2(e) and the scale of the keys.
    grid (programs,): each takes every programs-th piece of work. Only the last tile of a chunk is masked.
    """
    PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS  # tiles of a group
    HEADS: tl.constexpr = KV_HEADS * GROUP
    block_stride = KV_HEADS * BLOCK_SIZE * D
    d = tl.arange(0, PADDED_D)
    lane = tl.arange(0, KEYS)
    work = tl.load(counts) * (KV_HEADS * PARTS)
    for index in tl.range(tl.program_id(0), work, tl.num_programs(0)):
        # Neighbouring programs take the heads of one chunk, which lie side by side in the cache.
        kv_head = index % KV_HEADS
        part = index // KV_HEADS % PARTS
        item = items + index // (KV_HEADS * PARTS) * FIELDS
        query = tl.load(item).to(tl.int64)
        table = block_tables + tl.load(item + 1).to(tl.int64) * table_width
        begin, end, slot = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        of_group = part * ROWS + tl.arange(0, ROWS)
        head = kv_head * GROUP + of_group
        mine = (of_group < GROUP)[:, None] & (d < D)[None, :]
        queries = tl.load(q + query * (HEADS * D) + head[:, None] * D + d[None, :], mask=mine, other=0.0)
        keys, values = k_cache + kv_head * (BLOCK_SIZE * D), v_cache + kv_head * (BLOCK_SIZE * D)

        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_D], tl.float32)
        full = begin + (end - begin) // KEYS * KEYS
        for start in tl.range(begin, full, KEYS):
            token = start + lane
            at = page_rows(table, token, token < end, block_stride, D, BLOCK_SIZE, False)
            k = load_tile(keys, at, token < end, D, PADDED_D, False, True)
            v = load_tile(values, at, token < end, D, PADDED_D, False, False)
            most, total, mixed = fold(queries, k, v, mine, most, total, mixed, scale, False, PRECISION)
        if full < end:
            token = full + lane
            at = page_rows(table, token, token < end, block_stride, D, BLOCK_SIZE, True)
            k = load_tile(keys, at, token < end, D, PADDED_D, True, True)
            v = load_tile(values, at, token < end, D, PADDED_D, True, False)
            most, total, mixed = fold(queries, k, v, (token < end)[None, :], most, total, mixed, scale, True, PRECISION)

        result = mixed * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        if slot < 0:
            at_out = out + query * (HEADS * D) + head[:, None] * D + d[None, :]
            tl.store(at_out, result.to(out.dtype.element_ty), mask=mine)
        else:
            place = slot.to(tl.int64) * HEADS + head
            tl.store(partial + place[:, None] * D + d[None, :], result, mask=mine)
            tl.store(partial_log + place, most + tl.log2(total), mask=of_group < GROUP)


@triton.jit
def reduce_kernel(
    rows,
    partial,
    partial_log,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    PIECES: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Weighs the partial results of a row by their share of the softmax. grid (R, HEADS). One chunk needs no sum."""
    row, head = rows + tl.program_id(0) * FIELDS, tl.program_id(1)
    pieces = tl.load(row + 6)
    if pieces <= 1:
        return
    first, token = tl.load(row + 5).to(tl.int64), tl.load(row + 7).to(tl.int64)
    d = tl.arange(0, PADDED_D)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([PADDED_D], tl.float32)
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        inside = piece < pieces
        place = (first + piece) * HEADS + head
        log = tl.load(partial_log + place, mask=inside, other=float("-inf"))
        values = tl.load(partial + place[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        new_most = tl.maximum(most, tl.max(log, axis=0))  # finite: every chunk has a key
        weights = tl.exp2(log - new_most)
        shrink = tl.exp2(most - new_most)
        total = total * shrink + tl.sum(weights, axis=0)
        mixed = mixed * shrink + tl.sum(values * weights[:, None], axis=0)
        most = new_most
    result = (mixed / total).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head) * D + d, result, mask=d < D)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    out: Tensor,
    tiles: Tiles,
    scale: float,
    v_scale: float,
    multiprocessors: int,
) -> None:
    """Fills the rows of out that the plan names. scale: of the scores, in base 2."""
    _, heads, d = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    padded = power_of_2(d)
    partial = torch.empty((plan.partials, heads, d), dtype=torch.float32, device=q.device)
    partial_log = torch.empty((plan.partials, heads), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    most_work = plan.items.shape[0] * kv_heads * -(-group // tiles.rows)
    decode_kernel[(min(multiprocessors * tiles.per_sm, most_work),)](
        q,
        k_cache,
        v_cache,
        block_tables,
        plan.items,
        plan.counts,
        out,
        partial,
        partial_log,
        block_tables.shape[1],
        scale,
        v_scale,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=d,
        PADDED_D=padded,
        BLOCK_SIZE=block_size,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        FIELDS=FIELDS,
        PRECISION=dot_precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.paged_stages,
    )
    if plan.partials:
        reduce_kernel[(len(plan.rows), heads)](
            plan.rows,
            partial,
            partial_log,
            out,
            HEADS=heads,
            D=d,
            PADDED_D=padded,
            PIECES=16,
            FIELDS=FIELDS,
            num_warps=2,
        )
