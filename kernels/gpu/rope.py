"""The rotary embedding, the optional norms of q, k (Qwen3) and v (Gemma 4), and the cache write, in one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.few_rows.dependent_launch import let_next_start, wait_for_previous
from quire.kernels.gpu.supported import FP8
from quire.kernels.gpu.tile_sizes import power_of_2


@triton.jit
def rope_and_cache_kernel(
    qkv,
    positions,
    cos_sin,
    slots,
    k_cache,
    v_cache,
    q_out,
    q_norm,
    k_norm,
    v_norm,
    eps,
    max_position,
    slot_count,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2, padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    KEEP_K: tl.constexpr,  # also write the rotated k and the norm of v into qkv, for attention without the cache
    FP8: tl.constexpr,
    PDL: tl.constexpr,  # see `few_rows.dependent_launch`
):
    """Compute q_out [T, HEADS, D] and write k and v to the caches [blocks, KV_HEADS, BLOCK_SIZE, D].

    qkv [T, (HEADS + 2 KV_HEADS) * D]; cos_sin [max_position, D] float32: cosines, then sines; slots [T], -1: not kept.
    The caches have qkv's dtype, or float8e4nv, to which values saturate. A slot outside the cache is not written. A
    position outside the table is clamped into it. Offsets are int64.
    grid (T, cdiv(HEADS + 2 KV_HEADS, BLOCK_HEADS)): the heads of q, k and v are one axis.
    """
    if PDL:
        let_next_start()
        wait_for_previous()
    act = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, HALF)
    exists = (head < HEADS + 2 * KV_HEADS)[:, None] & (i < D // 2)[None, :]
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    source = qkv + token * (HEADS + 2 * KV_HEADS) * D + head[:, None] * D + i[None, :]
    a = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(source + D // 2, mask=exists, other=0.0).to(tl.float32)
    plain_a, plain_b = a, b

    if Q_NORM or K_NORM or V_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D
        factor = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        scaled_a, scaled_b = (a * factor).to(act).to(tl.float32), (b * factor).to(act).to(tl.float32)
        if Q_NORM:
            of_a = tl.load(q_norm + i, mask=i < D // 2, other=0.0).to(tl.float32)[None, :]
            of_b = tl.load(q_norm + D // 2 + i, mask=i < D // 2, other=0.0).to(tl.float32)[None, :]
            a = tl.where(is_q[:, None], (scaled_a * of_a).to(act).to(tl.float32), a)
            b = tl.where(is_q[:, None], (scaled_b * of_b).to(act).to(tl.float32), b)
        if K_NORM:
            of_a = tl.load(k_norm + i, mask=i < D // 2, other=0.0).to(tl.float32)[None, :]
            of_b = tl.load(k_norm + D // 2 + i, mask=i < D // 2, other=0.0).to(tl.float32)[None, :]
            a = tl.where(is_k[:, None], (scaled_a * of_a).to(act).to(tl.float32), a)
            b = tl.where(is_k[:, None], (scaled_b * of_b).to(act).to(tl.float32), b)
        if V_NORM:
            of_a = tl.load(v_norm + i, mask=i < D // 2, other=0.0).to(tl.float32)[None, :]
            of_b = tl.load(v_norm + D // 2 + i, mask=i < D // 2, other=0.0).to(tl.float32)[None, :]
            plain_a = (scaled_a * of_a).to(act).to(tl.float32)
            plain_b = (scaled_b * of_b).to(act).to(tl.float32)

    position = tl.load(positions + token)
    position = tl.minimum(tl.maximum(position, 0), max_position - 1).to(tl.int64)
    cos = tl.load(cos_sin + position * D + i, mask=i < D // 2, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * D + D // 2 + i, mask=i < D // 2, other=0.0)[None, :]
    out_a = tl.where(is_v[:, None], plain_a, a * cos - b * sin)
    out_b = tl.where(is_v[:, None], plain_b, b * cos + a * sin)

    q_at = q_out + token * HEADS * D + head[:, None] * D + i[None, :]
    tl.store(q_at, out_a.to(act), mask=exists & is_q[:, None])
    tl.store(q_at + D // 2, out_b.to(act), mask=exists & is_q[:, None])
    if KEEP_K:
        tl.store(source, out_a.to(act), mask=exists & is_k[:, None])
        tl.store(source + D // 2, out_b.to(act), mask=exists & is_k[:, None])
        if V_NORM:
            tl.store(source, out_a.to(act), mask=exists & is_v[:, None])
            tl.store(source + D // 2, out_b.to(act), mask=exists & is_v[:, None])

    slot = tl.load(slots + token).to(tl.int64)
    kept = exists & ((slot >= 0) & (slot < slot_count))
    if FP8:
        # Rounded to act first, as in a cache of that type: attention to fresh keys starts from those numbers too.
        out_a = tl.clamp(out_a.to(act).to(tl.float32), -448.0, 448.0)
        out_b = tl.clamp(out_b.to(act).to(tl.float32), -448.0, 448.0)
    out_a, out_b = out_a.to(k_cache.dtype.element_ty), out_b.to(k_cache.dtype.element_ty)
    row = (slot // BLOCK_SIZE) * (KV_HEADS * BLOCK_SIZE * D) + (slot % BLOCK_SIZE) * D
    k_at = k_cache + row + (head - HEADS)[:, None] * (BLOCK_SIZE * D) + i[None, :]
    tl.store(k_at, out_a, mask=kept & is_k[:, None])
    tl.store(k_at + D // 2, out_b, mask=kept & is_k[:, None])
    v_at = v_cache + row + (head - HEADS - KV_HEADS)[:, None] * (BLOCK_SIZE * D) + i[None, :]
    tl.store(v_at, out_a, mask=kept & is_v[:, None])
    tl.store(v_at + D // 2, out_b, mask=kept & is_v[:, None])


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keep_k: bool = False,
    v_norm: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Compute `Ops.rope_and_cache` with checked arguments.

    keep_k: also write the k and v of the cache into qkv. pdl: launch dependently (`few_rows.dependent_launch`).
    """
    tokens = len(qkv)
    blocks, _, block_size, d = k_cache.shape
    q = qkv.new_empty((tokens, num_heads, d))
    if tokens == 0:
        return q
    all_heads = num_heads + 2 * num_kv_heads
    block_heads = min(8, power_of_2(all_heads))
    rope_and_cache_kernel[(tokens, triton.cdiv(all_heads, block_heads))](
        qkv, positions, cos_sin, slot_mapping, k_cache, v_cache, q, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, qkv if v_norm is None else v_norm, eps, len(cos_sin), blocks * block_size,
        HEADS=num_heads, KV_HEADS=num_kv_heads, D=d, HALF=power_of_2(d // 2), BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads, Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        V_NORM=v_norm is not None, KEEP_K=keep_k, FP8=k_cache.dtype == FP8, PDL=pdl, num_warps=2,
        launch_pdl=pdl,
    )  # fmt: skip
    return q
