"""Sampling as kernels/ops.py defines it, without sorting: a search finds the thresholds of top-k and top-p.

Both filters keep the ids at or above a threshold. The weight of these ids (their number, or their mass) falls as the
threshold rises, so the largest threshold with enough weight can be bracketed. Each pass over the row tries three
thresholds, in the order of the bits of a float32, and leaves a quarter of the bracket. The search ends when one id is
left in the bracket, usually after seven to ten passes, or when the bracket is one value, after sixteen passes.

The randomness is one uniform number per row, which the engine derives from the request's seed and the token's position.
The draw inverts the cumulative distribution in id order. Adding Gumbel noise to each logit would save one pass, but the
draw would depend on the random generator of the device. With a uniform number, a request draws the same tokens on every
backend.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.logits import load_logits, ordered_bits, row_largest


@triton.jit
def _probability(value, largest, temperature):
    """Return the probability relative to that of the largest logit. `largest` is finite or plus infinity."""
    return tl.where(value == largest, 1.0, tl.exp(tl.div_rn(value - largest, temperature)))


@triton.jit
def _threshold(
    row, vocabulary, largest, temperature, lowest, low, high, target, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a threshold in [low, high] for the ids that together weigh at least `target`.

    The ids at or above it are those at or above the largest key whose ids weigh at least `target`.

    BY_COUNT: the keys are those of logits, and each id has weight 1. Otherwise the keys are the bits of probabilities,
    each id has its probability as weight, and only ids with a logit key of at least `lowest` count. low, high: int64;
    low is the solution if no larger key is.
    """
    within = tl.full([], 2, tl.int32)  # ids in the bracket
    while (low < high) & (within > 1):
        step = (high - low + 3) // 4
        pivot_1 = low + step
        pivot_2, pivot_3 = tl.minimum(pivot_1 + step, high), tl.minimum(pivot_1 + 2 * step, high)
        weight_1 = tl.zeros([BLOCK], tl.float32)
        weight_2 = tl.zeros([BLOCK], tl.float32)
        weight_3 = tl.zeros([BLOCK], tl.float32)
        bracketed = tl.zeros([BLOCK], tl.int32)
        ahead = load_logits(row, tl.arange(0, BLOCK), vocabulary)
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = ahead
            ahead = load_logits(row, column + BLOCK, vocabulary)
            key = ordered_bits(value)
            if BY_COUNT:
                counts = column < vocabulary
                weight = counts.to(tl.float32)
            else:
                counts = key >= lowest
                weight = tl.where(counts, _probability(value, largest, temperature), 0.0)
                key = weight.to(tl.int32, bitcast=True)
            weight_1 += tl.where(key >= pivot_1.to(tl.int32), weight, 0.0)
            weight_2 += tl.where(key >= pivot_2.to(tl.int32), weight, 0.0)
            weight_3 += tl.where(key >= pivot_3.to(tl.int32), weight, 0.0)
            bracketed += (counts & (key >= low.to(tl.int32)) & (key <= high.to(tl.int32))).to(tl.int32)
        reached_1 = tl.sum(weight_1.to(tl.float64), axis=0) >= target
        reached_2 = tl.sum(weight_2.to(tl.float64), axis=0) >= target
        reached_3 = tl.sum(weight_3.to(tl.float64), axis=0) >= target
        within = tl.sum(bracketed, axis=0)
        above = tl.where(reached_2, pivot_3, tl.where(reached_1, pivot_2, pivot_1)) - 1
        low = tl.where(reached_3, pivot_3, tl.where(reached_2, pivot_2, tl.where(reached_1, pivot_1, low)))
        high = tl.where(reached_3, high, above)
    return low


# The parameters have one value per row, and may be columns of a buffer, at any alignment.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "uniforms", "out"])
def sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, out, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out [R] int32 from logits [R, vocabulary] float32 and the parameters [R] of `Ops.sample`. grid (R,)."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * vocabulary
    temperature, top_k, top_p = tl.load(temperatures + r), tl.load(top_ks + r), tl.load(top_ps + r)
    largest = row_largest(row, vocabulary, BLOCK)
    if largest == float("-inf"):
        tl.store(out + r, 0)
        return

    lowest = tl.full([], -(2**31), tl.int64)
    if (top_k > 0) & (top_k < vocabulary):
        high = ordered_bits(largest).to(tl.int64)
        lowest = _threshold(
            row, vocabulary, largest, temperature, lowest, lowest, high, top_k.to(tl.float64), True, BLOCK
        )
    lowest = lowest.to(tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        value = load_logits(row, start + tl.arange(0, BLOCK), vocabulary)
        p = tl.where(ordered_bits(value) >= lowest, _probability(value, largest, temperature), 0.0)
        mass += p.to(tl.float64)
    total = tl.sum(mass, axis=0)

    floor = tl.minimum(tl.load(min_ps + r), 1.0)
    if top_p < 1:
        low, high = tl.full([], 0, tl.int64), tl.full([], 0x3F800000, tl.int64)  # the bits of 0 and of 1
        target = top_p.to(tl.float64) * total
        bits = _threshold(row, vocabulary, largest, temperature, lowest, low, high, target, False, BLOCK)
        floor = tl.maximum(floor, bits.to(tl.int32).to(tl.float32, bitcast=True))
    if (top_p < 1) | (floor > 0):
        mass = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocabulary, BLOCK):
            value = load_logits(row, start + tl.arange(0, BLOCK), vocabulary)
            p = tl.where(ordered_bits(value) >= lowest, _probability(value, largest, temperature), 0.0)
            mass += tl.where(p >= floor, p, 0.0).to(tl.float64)
        total = tl.sum(mass, axis=0)

    # The first id whose cumulative mass exceeds the target. If rounding leaves no such id, the last id with any mass.
    target = tl.load(uniforms + r) * total
    before = tl.zeros([], tl.float64)
    drawn = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while (drawn < 0) & (start < vocabulary):
        column = start + tl.arange(0, BLOCK)
        value = load_logits(row, column, vocabulary)
        p = tl.where(ordered_bits(value) >= lowest, _probability(value, largest, temperature), 0.0)
        p = tl.where(p >= floor, p, 0.0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(p > 0, column, 0), axis=0))
        here = tl.sum(p, axis=0)
        if before + here > target:
            beyond = (before + tl.cumsum(p, axis=0) > target) & (p > 0)
            found = tl.min(tl.where(beyond, column, vocabulary), axis=0)
            drawn = tl.where(found < vocabulary, found, last)
        before += here
        start += BLOCK
    tl.store(out + r, tl.where(drawn >= 0, drawn, last))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Compute `Ops.sample` with checked arguments."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits, temperature, top_k, top_p, min_p, uniform, out, vocabulary, BLOCK=4096, num_warps=16
        )
    return out
