"""Attention of new prompts from their own keys, for compute capability 9.0: warps with roles, and copies by the TMA.

The kernel computes the tiles of list FRESH of a `PrefillPlan`, as `prefill` does. The algorithm is that of
FlashAttention-3 (arXiv 2407.08608). One warp copies tiles of keys and of values to shared memory, two tiles of each at
a time. Two warpgroups compute 64 rows of the tile of queries each. A warpgroup starts the scores of a tile of keys
together with the weighted values of the tile before, and computes the softmax of the one while the tensor cores compute
the other. The warpgroups take turns to start products: one computes products while the other computes a softmax.

Tiles of keys go from the diagonal down to the first key: only the first one is masked.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.gpu.decode_plan import FIELDS
from quire.kernels.gpu.prefill_plan import FRESH, PrefillPlan

ROWS, KEYS, STAGES = 128, 128, 2
SWIZZLE = 128  # bytes: with it, neither copies nor products have conflicts between banks


@gluon.jit
def _rounds(counts, KV_HEADS: gl.constexpr):
    """Return the number of pieces of work of this program; see `prefill_kernel`."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    work = gl.load(counts) * KV_HEADS
    rounds = work // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + gl.where(place < work % programs, 1, 0)


@gluon.jit
def _item(turn, query_start, items, order, KV_HEADS: gl.constexpr, FIELDS: gl.constexpr):
    """Return a piece of work: key-value head, first query of the tile, first token and length of the prompt."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    index = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    at = items + gl.load(order + index // KV_HEADS) * FIELDS
    s, first = gl.load(at), gl.load(at + 1)
    begin, end = gl.load(query_start + s), gl.load(query_start + s + 1)
    return index % KV_HEADS, first, begin, end - begin


@gluon.jit
def _copy(matrix, tiles, ready, free, row, column, count, STAGES: gl.constexpr):
    """Copy tile number `count` of a matrix once its place is free."""
    stage = count % STAGES
    mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
    mbarrier.expect(ready.index(stage), matrix.nbytes_per_cta)
    tma.async_copy_global_to_shared(matrix, [row, column], ready.index(stage), tiles.index(stage))


@gluon.jit
def _copy_tiles(
    k, v, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, query_start, items, order, counts,
    KV_HEADS: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Copy all tiles in the order in which `_compute_rows` uses them. A tile may end after the prompt."""
    count = 0
    for turn in range(_rounds(counts, KV_HEADS)):
        kv_head, first, begin, _ = _item(turn, query_start, items, order, KV_HEADS, FIELDS)
        column = kv_head * D
        row = begin + first // KEYS * KEYS
        _copy(k, k_tiles, k_ready, k_free, row, column, count, STAGES)
        while row > begin:
            _copy(k, k_tiles, k_ready, k_free, row - KEYS, column, count + 1, STAGES)
            _copy(v, v_tiles, v_ready, v_free, row, column, count, STAGES)
            row -= KEYS
            count += 1
        _copy(v, v_tiles, v_ready, v_free, row, column, count, STAGES)
        count += 1


@gluon.jit
def _fold(scores, most, total, scale):
    """Return weights, the factor of earlier results, and both statistics with these scores: `online_softmax.fold`."""
    new_most = gl.maximum(most, gl.max(scores, axis=1) * scale)
    base = new_most[:, None] + gl.zeros_like(scores)
    weights = gl.exp2(gl.fma(scores, scale + gl.zeros_like(scores), -base))
    shrink = gl.exp2(most - new_most)
    return weights, shrink, new_most, gl.fma(total, shrink, gl.sum(weights, axis=1))


@gluon.jit
def _compute_rows(
    half: gl.constexpr, q, out, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, cleaned,
    query_start, items, order, counts, scale, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Compute the first or the second half of the rows of each tile of queries, with four warps. half: 0 or 1."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MIXED, 2)
    PLAIN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes of each thread
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    MIXED_ROW: gl.constexpr = gl.SliceLayout(1, MIXED)
    HALF: gl.constexpr = ROWS // 2
    HEADS: gl.constexpr = KV_HEADS * GROUP
    PART: gl.constexpr = 16
    dtype: gl.constexpr = q.dtype.element_ty

    queries, my_turn, other_turn = q_tiles.index(half), turns.index(half), turns.index(1 - half)
    plain_row = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, PLAIN))
    d = gl.arange(0, D, gl.SliceLayout(0, PLAIN))
    row = half * HALF + gl.arange(0, HALF, ROW)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    count, steps, cleanings = 0, 0, 0  # tiles of keys so far, those of them with a turn, and those cleaned
    if half == 1:
        mbarrier.arrive(other_turn)
    for turn in range(_rounds(counts, KV_HEADS)):
        kv_head, first, begin, length = _item(turn, query_start, items, order, KV_HEADS, FIELDS)
        query = first + plain_row // GROUP
        at = (begin + query).to(gl.int64) * (HEADS * D) + (kv_head * GROUP + plain_row % GROUP) * D
        exists = (query < length)[:, None] & (d < D)[None, :]
        queries.store(gl.load(q + at[:, None] + d[None, :], mask=exists, other=0.0))
        fence_async_shared()

        # 1) The diagonal. Keys after the end of the prompt are of the next one, or undefined; so are such rows.
        start = first // KEYS * KEYS
        stage, phase = count % STAGES, count // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        keys = k_tiles.index(stage).permute((1, 0))
        scores = gl.zeros([HALF, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(queries, keys, scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(stage))
        scores = gl.where((start + key)[None, :] <= (first + row // GROUP)[:, None], scores, float("-inf"))
        most = gl.full([HALF], float("-inf"), gl.float32, ROW)
        total = gl.zeros([HALF], gl.float32, ROW)
        weights, shrink, most, total = _fold(scores, most, total, scale)
        left = gl.convert_layout(weights.to(dtype), WEIGHTS)
        mixed = gl.zeros([HALF, D], gl.float32, MIXED)
        if start + KEYS > length:
            # Zero times NaN is NaN: set values after the end of the prompt to zero. Each warpgroup does one half.
            mbarrier.wait(v_ready.index(stage), phase)
            mine = v_tiles.index(stage).slice(half * (KEYS // 2), KEYS // 2)
            token = start + half * (KEYS // 2) + gl.arange(0, PART, gl.SliceLayout(1, PLAIN))
            for part in gl.static_range(0, KEYS // 2, PART):
                values = mine.slice(part, PART).load(PLAIN)
                inside = (token + part < length)[:, None]
                mine.slice(part, PART).store(gl.where(inside, values, gl.zeros_like(values)))
            fence_async_shared()
            mbarrier.arrive(cleaned)
            mbarrier.wait(cleaned, cleanings & 1)
            cleanings += 1

        # 2) All tiles before it: the scores of a tile, and the values of the tile before.
        while start > 0:
            next_stage, next_phase = (count + 1) % STAGES, (count + 1) // STAGES & 1
            mbarrier.wait(k_ready.index(next_stage), next_phase)
            mbarrier.wait(v_ready.index(stage), phase)
            mbarrier.wait(my_turn, steps & 1)
            keys = k_tiles.index(next_stage).permute((1, 0))
            scores = gl.zeros([HALF, KEYS], gl.float32, SCORES)
            scores = warpgroup_mma(queries, keys, scores, use_acc=False, is_async=True)
            mixed = warpgroup_mma(left, v_tiles.index(stage), mixed, is_async=True)
            mbarrier.arrive(other_turn)
            scores = warpgroup_mma_wait(1, [scores])
            mbarrier.arrive(k_free.index(next_stage))
            weights, shrink, most, total = _fold(scores, most, total, scale)
            mixed = warpgroup_mma_wait(0, [mixed])
            mbarrier.arrive(v_free.index(stage))
            mixed *= gl.convert_layout(shrink, MIXED_ROW)[:, None]
            left = gl.convert_layout(weights.to(dtype), WEIGHTS)
            stage, phase = next_stage, next_phase
            start -= KEYS
            steps += 1
            count += 1

        # 3) The values of the first tile, and the result. It takes the place of the queries, to be stored in lines.
        mbarrier.wait(v_ready.index(stage), phase)
        mixed = warpgroup_mma(left, v_tiles.index(stage), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, [mixed])
        mbarrier.arrive(v_free.index(stage))
        count += 1
        result = mixed * gl.convert_layout(1.0 / total, MIXED_ROW)[:, None]
        queries.store(result.to(dtype))
        gl.store(out + at[:, None] + d[None, :], queries.load(PLAIN), mask=exists)


@gluon.jit(do_not_specialize_on_alignment=["items", "order", "counts"])
def hopper_prefill_kernel(
    q, k, v, query_start, items, order, counts, out, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Compute out [T, KV_HEADS * GROUP, D] from q of the same shape, causal. k, v: descriptors of [T, KV_HEADS * D].

    items, order, counts: list FRESH of a PrefillPlan with ROWS / GROUP queries in a tile; GROUP divides ROWS, so that
    the queries of a tile see parts of one tile of keys only. scale: of the scores, in base 2. grid (programs,), see
    `prefill_kernel`.
    """
    q_tiles = gl.allocate_shared_memory(k.dtype, [2, ROWS // 2, D], k.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, KEYS, D], v.layout)
    k_ready = mbarrier.allocate_mbarrier(batch=STAGES)
    k_free = mbarrier.allocate_mbarrier(batch=STAGES)
    v_ready = mbarrier.allocate_mbarrier(batch=STAGES)
    v_free = mbarrier.allocate_mbarrier(batch=STAGES)
    turns = mbarrier.allocate_mbarrier(batch=2)
    cleaned = mbarrier.allocate_mbarrier()
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), 1)
        mbarrier.init(v_ready.index(stage), 1)
        mbarrier.init(k_free.index(stage), 2)
        mbarrier.init(v_free.index(stage), 2)
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), 1)
    mbarrier.init(cleaned, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute_rows, (
                0, q, out, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, cleaned, query_start,
                items, order, counts, scale, KV_HEADS, GROUP, D, ROWS, KEYS, STAGES, FIELDS,
            )),
            (_compute_rows, (
                1, q, out, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, cleaned, query_start,
                items, order, counts, scale, KV_HEADS, GROUP, D, ROWS, KEYS, STAGES, FIELDS,
            )),
            (_copy_tiles, (
                k, v, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, query_start, items, order, counts, KV_HEADS,
                D, KEYS, STAGES, FIELDS,
            )),
        ],
        [4, 1],  # warps of the second and third role; the first has num_warps
        [240, 24],  # their registers; the first role gets the rest of 64 K, 240, too
    )  # fmt: skip


def supports(q: Tensor, kv: tuple[Tensor, Tensor], rows: int) -> bool:
    """Return whether the kernel computes queries [T, H, D] with keys and values [T, H_kv, D] in tiles of `rows`."""
    group, d = q.shape[1] // kv[0].shape[1], q.shape[2]
    is_aligned = not any(one.data_ptr() % 16 or one.stride(0) * one.itemsize % 16 for one in kv)  # TMA
    return q.dtype.itemsize == 2 and d in (64, 128) and rows == ROWS and not ROWS % group and is_aligned


def hopper_prefill(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, plan: PrefillPlan, out: Tensor, scale: float,
    multiprocessors: int,
) -> None:  # fmt: skip
    """Compute the rows of out [T, H, D] that list FRESH of the plan names. scale: of the scores, in base 2.

    k, v: [T, H_kv, D], see `supports`. A multiprocessor holds one program.
    """
    _, heads, d = q.shape
    kv_heads = k.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=16, rank=2)
    keys, values = (
        TensorDescriptor(rows, [len(rows), kv_heads * d], [rows.stride(0), 1], [KEYS, d], layout) for rows in (k, v)
    )
    programs = max(1, min(plan.bounds[FRESH] * kv_heads, multiprocessors))  # the next tile is copied ahead
    hopper_prefill_kernel[(programs,)](
        q, keys, values, query_start, plan.items[FRESH], plan.order[FRESH], plan.counts[FRESH:], out, scale,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=d, ROWS=ROWS, KEYS=KEYS, STAGES=STAGES, FIELDS=FIELDS,
        num_warps=4,
    )  # fmt: skip
