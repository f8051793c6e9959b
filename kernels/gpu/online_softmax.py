"""The online softmax of the attention kernels: load a tile of keys or values and fold it into the running result."""

import math

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.supported import WIDE_HEAD_DIM

LOG2_E = math.log2(math.e)


def cap_scales(scale: float, softcap: float) -> tuple[float, float]:
    """Return `scale` and `cap_scale` of `fold` for scores that are multiplied by `scale`, in base 2.

    softcap: in base e, as in `Ops.paged_attention`; 0: none.
    """
    return (softcap * LOG2_E, 2 * scale / softcap) if softcap else (scale, 0.0)


@triton.jit
def page_rows(table, token, inside, block_stride, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Return the offsets of tokens [KEYS] in a cache [blocks, H_kv, BLOCK_SIZE, D], for head 0, in elements, as int64.

    The tile may span several blocks or a part of one: a vector of block ids replaces a loop over blocks. If MASKED,
    table entries of tokens that are not `inside` are not read.
    """
    if MASKED:
        block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0)
    else:
        block = tl.load(table + token // BLOCK_SIZE)
    return block.to(tl.int64) * block_stride + (token % BLOCK_SIZE) * D


@triton.jit
def load_tile(
    base, row, inside, D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Load D values from each base + row [KEYS]: [KEYS, PADDED_D], or [PADDED_D, KEYS] if TRANSPOSED; padding is zero.

    MASKED: rows that are not `inside` are not read, and are zero.
    """
    d = tl.arange(0, PADDED_D)
    if TRANSPOSED:
        at = base + row[None, :] + d[:, None]
        if MASKED:
            tile = tl.load(at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        elif D != PADDED_D:
            tile = tl.load(at, mask=(d < D)[:, None], other=0.0)
        else:
            tile = tl.load(at)
    else:
        at = base + row[:, None] + d[None, :]
        if MASKED:
            tile = tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        elif D != PADDED_D:
            tile = tl.load(at, mask=(d < D)[None, :], other=0.0)
        else:
            tile = tl.load(at)
    return tile


def computes_in_float16(q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether products of bfloat16 queries with an fp8 cache are computed in float16; see `to_float16`.

    The compiler keeps converted queries in registers. With heads of 144 to 256, 64 more registers of a thread would
    spill. Larger heads have small tiles, with room for them.
    """
    is_wide = head_dim > WIDE_HEAD_DIM
    return q_dtype == torch.bfloat16 and kv_dtype == torch.float8_e4m3fn and (head_dim <= 128 or is_wide)


@triton.jit
def to_float16(q):
    """Return bfloat16 queries [ROWS, D] as float16, each row times a power of two, and the inverse factors [ROWS].

    One instruction converts two e4m3 values to float16; bfloat16 takes two more conversions of each value, one at a
    time. The largest value of a row becomes 2**14 to 2**15. All normal values that are at least 2**-31 of it are
    exact, and smaller ones are wrong by at most 2**-39 of it. A row depends on that row alone.
    """
    wide = q.to(tl.float32)
    exponent = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True) >> 23  # with a bias of 127
    exponent = tl.maximum(exponent, 15)  # both factors are normal numbers
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (wide * factor[:, None]).to(tl.float16), inverse


@triton.jit
def fold(
    q, k, v, seen, most, total, mixed, scale, cap_scale, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, HALF: tl.constexpr = False,
):  # fmt: skip
    """Compute one step of the online softmax (FlashAttention, arXiv 2205.14135, algorithm 1), in base 2.

    q [ROWS, D], k [D, KEYS], v [KEYS, D], seen [ROWS, KEYS] (if MASKED). most, total [ROWS] and mixed [ROWS, D],
    float32: the largest score, the sum of weights and the weighted values so far; returned with these keys added.
    scale includes log2(e) and is positive. CAPPED: it is the factor of tanh(scores); cap_scale: of the scores inside
    tanh, times 2 log2(e), because tanh(x) = 1 - 2 / (exp(2x) + 1).
    HALF: q is of `to_float16`, and the factor of the scores, cap_scale if CAPPED and scale otherwise, has an entry for
    each row, [ROWS]. Weights are at most 2**14 then, and not 1, so that float16 has small weights, too: those of at
    least 2**-28 of the largest are rounded to 11 bits, smaller ones are wrong by at most 2**-39 of it. `most` is the
    largest score less 14.

    The code says with fma whether a product and a sum are rounded once or twice. The compiler would decide it for
    masked and for whole tiles separately, and in the batch-invariant mode a key may be in either.
    """
    scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
    if CAPPED:
        if HALF:
            cap_scale = cap_scale[:, None]
        scores = tl.fma(1.0 / (tl.exp2(scores * cap_scale) + 1.0), -2.0, 1.0)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    if HALF:
        new_most = tl.maximum(most, tl.fma(tl.max(scores, axis=1), scale, -14.0))
        if not CAPPED:
            scale = scale[:, None]
    else:
        new_most = tl.maximum(most, tl.max(scores, axis=1) * scale)
    if MASKED:  # noqa: SIM108
        # for a row that has seen no key yet: infinity minus itself would be NaN
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
    else:
        base = new_most
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    shrink = tl.exp2(most - base)
    total = tl.fma(total, shrink, tl.sum(weights, axis=1))
    mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed * shrink[:, None], input_precision=PRECISION)
    return new_most, total, mixed


@triton.jit
def merge(most, total, mixed, next_most, next_total, next_mixed):
    """Merge the results of `fold` for two successive ranges of keys of the same rows.

    The result of no keys is zeros, with a largest score of minus infinity. Merging it leaves the other result unchanged
    to the bit.
    """
    new_most = tl.maximum(most, next_most)
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    keep, take = tl.exp2(most - base), tl.exp2(next_most - base)
    total = tl.fma(total, keep, next_total * take)
    mixed = tl.fma(mixed, keep[:, None], next_mixed * take[:, None])
    return new_most, total, mixed


@triton.jit
def normaliser(most, total, sinks, head, exists, SINKS: tl.constexpr):
    """Return the factors [ROWS] of the weighted values of rows with these results of `fold`: 1 / sum of the weights.

    SINKS: the sum includes the sinks of the heads, sinks [H], base e. head, exists [ROWS]: rows that do not exist have
    no head. A row without keys has weighted values of zero, and any finite factor.
    """
    if SINKS:
        sink = tl.load(sinks + head, mask=exists, other=0.0)
        log2_e = 1.4426950408889634
        base = tl.maximum(most, sink * log2_e)
        keep = tl.exp2(most - base)
        factor = keep / tl.fma(total, keep, tl.exp2(tl.fma(sink, log2_e, -base)))
    else:
        factor = 1.0 / tl.where(total > 0, total, 1.0)
    return factor
