"""Attention of decode rows: a persistent grid over the chunks of a plan, and a sum over the chunks of a row.

The query heads of a group are one tile of at least 16 rows, so that keys are loaded once for the group and multiplied
by matrix instructions. Padding the tile costs no time, because the bandwidth of the cache is the limit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.decode_plan import FIELDS, DecodePlan
from quire.kernels.gpu.few_rows.dependent_launch import let_next_start, wait_for_previous
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
from quire.kernels.gpu.tile_sizes import AttentionTiles, dot_precision, power_of_2

# Programs of `reduce_kernel` for each multiprocessor: half of those that it can hold, which hide the latency of memory.
SUMS_PER_SM = 16
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit(do_not_specialize=["table_width"])
def decode_kernel(
    q, k_cache, v_cache, block_tables, items, counts, out, partial, partial_weights, sinks, table_width, scale,
    cap_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q, out [T, KV_HEADS * GROUP, D]; caches [blocks, KV_HEADS, BLOCK_SIZE, D]; items, counts of a DecodePlan.

    A row of one chunk is written to out. Other chunks write their weighted values to partial [slots, heads, D], and the
    largest score and the sum of weights to partial_weights [slots, heads, 2], all float32, as `fold` returns them.
    scale, cap_scale, CAPPED: see `fold`; sinks, SINKS: see `normaliser`; HALF: see `to_float16`. PDL: see
    `few_rows.dependent_launch`.
    grid (programs,): program p computes pieces p, p + programs, ... of the work. Only the last tile of a chunk is
    masked.
    """
    PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS  # tiles of a group
    HEADS: tl.constexpr = KV_HEADS * GROUP
    block_stride = KV_HEADS * BLOCK_SIZE * D
    d = tl.arange(0, PADDED_D)
    lane = tl.arange(0, KEYS)
    if PDL:
        let_next_start()
        wait_for_previous()
    work = tl.load(counts) * (KV_HEADS * PARTS)
    for index in tl.range(tl.program_id(0), work, tl.num_programs(0)):
        # Neighbouring programs compute the heads of one chunk, because these heads are neighbours in the cache.
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
        row_scale, row_cap_scale = scale, cap_scale
        if HALF:
            queries, inverse = to_float16(queries)
            if CAPPED:
                row_cap_scale = cap_scale * inverse
            else:
                row_scale = scale * inverse

        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_D], tl.float32)
        full = begin + (end - begin) // KEYS * KEYS
        for start in tl.range(begin, full, KEYS):
            token = start + lane
            at = page_rows(table, token, token < end, block_stride, D, BLOCK_SIZE, False)
            k = load_tile(keys, at, token < end, D, PADDED_D, False, True)
            v = load_tile(values, at, token < end, D, PADDED_D, False, False)
            most, total, mixed = fold(
                queries, k, v, mine, most, total, mixed, row_scale, row_cap_scale, False, CAPPED, PRECISION, HALF
            )
        if full < end:
            token = full + lane
            at = page_rows(table, token, token < end, block_stride, D, BLOCK_SIZE, True)
            k = load_tile(keys, at, token < end, D, PADDED_D, True, True)
            v = load_tile(values, at, token < end, D, PADDED_D, True, False)
            seen = (token < end)[None, :]
            most, total, mixed = fold(
                queries, k, v, seen, most, total, mixed, row_scale, row_cap_scale, True, CAPPED, PRECISION, HALF
            )

        if slot < 0:
            result = mixed * normaliser(most, total, sinks, head, of_group < GROUP, SINKS)[:, None]
            at_out = out + query * (HEADS * D) + head[:, None] * D + d[None, :]
            tl.store(at_out, result.to(out.dtype.element_ty), mask=mine)
        else:
            place = slot.to(tl.int64) * HEADS + head
            tl.store(partial + place[:, None] * D + d[None, :], mixed, mask=mine)
            tl.store(partial_weights + place * 2, most, mask=of_group < GROUP)
            tl.store(partial_weights + place * 2 + 1, total, mask=of_group < GROUP)


# The number of rows is a part of a tensor, at any alignment.
@triton.jit(do_not_specialize_on_alignment=["count"])
def reduce_kernel(
    rows, count, partial, partial_weights, out, sinks,
    HEADS: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, PIECES: tl.constexpr, FIELDS: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the partial results of the chunks of each row into out. Rows of one chunk are skipped.

    count [1] int32: rows. PIECES: chunks that are summed at a time. 1: one after the other in the order of the keys, as
    `prefill_kernel` sums them. sinks, SINKS: see `normaliser`. PDL: see `few_rows.dependent_launch`.
    grid (programs, HEADS): program p sums rows p, p + programs, ...
    """
    head = tl.program_id(1)
    d = tl.arange(0, PADDED_D)
    if PDL:
        let_next_start()
        wait_for_previous()
    for index in tl.range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        row = rows + index * FIELDS
        pieces = tl.load(row + 6)
        if pieces > 1:
            first, token = tl.load(row + 5).to(tl.int64), tl.load(row + 7).to(tl.int64)
            most = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            mixed = tl.zeros([1, PADDED_D], tl.float32)
            for start in tl.range(0, pieces, PIECES, num_stages=4 if PIECES == 1 else 1):
                piece = start + tl.arange(0, PIECES)
                inside = piece < pieces
                place = (first + piece) * HEADS + head
                # A query of a prompt sees no key of chunks after it. With minus infinity, the difference below could be
                # NaN.
                of_piece = tl.maximum(tl.load(partial_weights + place * 2, mask=inside, other=LOWEST), LOWEST)
                sums = tl.load(partial_weights + place * 2 + 1, mask=inside, other=0.0)
                there = inside[:, None] & (d < D)[None, :]
                values = tl.load(partial + place[:, None] * D + d[None, :], mask=there, other=0.0)
                if PIECES > 1:
                    largest = tl.max(of_piece, axis=0)
                    weights = tl.exp2(of_piece - largest)
                    of_piece = tl.zeros([1], tl.float32) + largest
                    sums = tl.zeros([1], tl.float32) + tl.sum(sums * weights, axis=0)
                    values = tl.sum(values * weights[:, None], axis=0)[None, :]
                most, total, mixed = merge(most, total, mixed, of_piece, sums, values)
            sink = head + tl.zeros([1], tl.int32)
            result = mixed * normaliser(most, total, sinks, sink, sink < HEADS, SINKS)[:, None]
            at = out + (token * HEADS + head) * D + d[None, :]
            tl.store(at, result.to(out.dtype.element_ty), mask=(d < D)[None, :])


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    out: Tensor,
    tiles: AttentionTiles,
    scale: float,
    multiprocessors: int,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    pdl: bool = False,
) -> None:
    """Compute the rows of out [T, H, D] that the plan names.

    scale: factor of the scores, in base 2. pdl: launch dependently (`few_rows.dependent_launch`).
    """
    scale, cap_scale = cap_scales(scale, softcap)
    _, heads, d = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    padded = power_of_2(d)
    partial = torch.empty((plan.partials, heads, d), dtype=torch.float32, device=q.device)
    partial_weights = torch.empty((plan.partials, heads, 2), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    most_work = plan.items.shape[0] * kv_heads * -(-group // tiles.rows)
    decode_kernel[(min(multiprocessors * tiles.per_sm, most_work),)](
        q, k_cache, v_cache, block_tables, plan.items, plan.counts, out, partial, partial_weights,
        q if sinks is None else sinks, block_tables.shape[1], scale, cap_scale,
        KV_HEADS=kv_heads, GROUP=group, D=d, PADDED_D=padded, BLOCK_SIZE=block_size, ROWS=tiles.rows,
        KEYS=tiles.keys, FIELDS=FIELDS, CAPPED=softcap > 0, SINKS=sinks is not None, PRECISION=dot_precision(q.dtype),
        HALF=computes_in_float16(q.dtype, k_cache.dtype, d), PDL=pdl,
        num_warps=tiles.warps, num_stages=tiles.paged_stages, launch_pdl=pdl,
    )  # fmt: skip
    if plan.partials:
        count = plan.counts[1:]
        sum_chunks(plan.rows, count, partial, partial_weights, out, multiprocessors, sinks, plan.in_order, pdl)


def sum_chunks(
    rows: Tensor,
    count: Tensor,
    partial: Tensor,
    partial_weights: Tensor,
    out: Tensor,
    multiprocessors: int,
    sinks: Tensor | None,
    in_order: bool = False,
    pdl: bool = False,
) -> None:
    """Sum the partial results of rows with several chunks into out [T, H, D]. Arguments: see `reduce_kernel`.

    in_order: one chunk after the other in the order of the keys.
    """
    _, heads, d = out.shape
    programs = min(len(rows), -(-multiprocessors * SUMS_PER_SM // heads))
    reduce_kernel[(programs, heads)](
        rows, count, partial, partial_weights, out, out if sinks is None else sinks,
        HEADS=heads, D=d, PADDED_D=power_of_2(d), PIECES=1 if in_order else 16, FIELDS=FIELDS,
        SINKS=sinks is not None, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
