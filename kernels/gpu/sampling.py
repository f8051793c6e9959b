"""Sampling as kernels/ops.py defines it, without sorting: histograms find the thresholds of top-k and top-p.

Several programs read a row, one for each segment of SEGMENT ids. The number of rows does not change the segments, so
the bits of a row do not depend on the batch. Programs of one launch share nothing but histograms, to which they only
add; the next launch reads these.

Both filters keep the ids at or above a threshold. A threshold is an integer key: the bits of a logit for top-k, the
bits of a probability for top-p. The ids with the largest keys weigh together enough: by number for top-k, by mass for
top-p. A pass adds the weight of each id to one of 2,048 bins of keys. The next pass does the same for the keys of the
bin in which the weight is reached, so three passes find the key (32 and 30 bits). The search ends before that when one
id is left. Weights are integers, so the order of the additions does not change their sums: a mass is a multiple of
1 / `unit`, with which the sum of a row is below 2^63.

Ids that cannot hold the threshold are left out of the first pass: few additions meet in one bin. See `_part_bound`, and
`mass_kernel` for top-p.

The randomness is one uniform number per row, which the engine derives from the request's seed and the token's position.
The draw inverts the cumulative distribution in id order. Adding Gumbel noise to each logit would save one pass, but the
draw would depend on the random generator of the device. With a uniform number, a request draws the same tokens on every
backend.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.logits import SEGMENT, load_logits, ordered_bits

PARTS = 32  # of a segment, whose largest logits bound the threshold of top-k
BINS = tl.constexpr(2048)  # of a histogram: 11 bits of a key
PASSES = 3
STATES = tl.constexpr(5)  # of the searches of a row: after two passes of top-k, at its end, after two passes of top-p
FOUND = tl.constexpr(-1)  # in place of the weight above a bracket: the search has ended
LOWEST_KEY = tl.constexpr(-(2**31))
ONE_BITS = tl.constexpr(0x3F800000)  # the key of probability 1


@triton.jit
def _probability(value, largest, scale):
    """Return the probability relative to that of the largest logit. scale: 1 / temperature.

    `largest` is finite or plus infinity. `tl.exp2` would save a multiplication, but it returns 0 below 2^-126, and a
    uniform number of 0 draws the first id with any mass.
    """
    return tl.where(value == largest, 1.0, tl.exp((value - largest) * scale))


@triton.jit
def _scale(temperatures, r):
    return tl.div_rn(tl.full([], 1.0, tl.float32), tl.load(temperatures + r))


@triton.jit
def _shift(BY_COUNT: tl.constexpr, PASS: tl.constexpr):
    """Return the bits of a key below those that choose its bin; PASS -1: all bits of a key."""
    bits: tl.constexpr = 32 if BY_COUNT else 30
    shift: tl.constexpr = bits - 11 * (PASS + 1) if PASS < 2 else 0
    return shift


@triton.jit
def _first_bracket(largest, is_wanted, BY_COUNT: tl.constexpr):
    """Return the largest key of a row, and the weight above it: 0, or FOUND if the row has no such filter.

    Without the filter, the key is the lowest one.
    """
    if BY_COUNT:
        high, lowest = ordered_bits(largest).to(tl.int64), tl.full([], LOWEST_KEY, tl.int64)
    else:
        high, lowest = tl.full([], ONE_BITS, tl.int64), tl.full([], 0, tl.int64)
    return tl.where(is_wanted, high, lowest), tl.where(is_wanted, 0, FOUND).to(tl.int64)


@triton.jit
def _narrowed(high, above, histogram, target, unit, BY_COUNT: tl.constexpr, PASS: tl.constexpr):
    """Return the bracket of the next pass: its largest key, and the weight of the ids above it, both int64.

    At the end of the search the weight is FOUND, and the key is the threshold. high, above: the bracket of this pass.
    histogram: its bins, from the largest keys down. target: float64.
    """
    shift: tl.constexpr = _shift(BY_COUNT, PASS)
    if above >= 0:
        number = tl.arange(0, BINS)
        weight = tl.load(histogram + number).to(tl.int64)
        reached = (above + tl.cumsum(weight, axis=0)).to(tl.float64) >= target
        chosen = tl.min(tl.where(reached, number, BINS - 1), axis=0)
        here = tl.sum(tl.where(number == chosen, weight, 0), axis=0)
        above += tl.sum(tl.where(number < chosen, weight, 0), axis=0)
        high -= chosen.to(tl.int64) << shift
        low = high - ((1 << shift) - 1)
        if BY_COUNT:
            low = tl.maximum(low, LOWEST_KEY)
            least = tl.full([], 1, tl.int64)
        else:
            low = tl.maximum(low, 0)
            least = _mass(low.to(tl.int32).to(tl.float32, bitcast=True), unit)
        if shift == 0:
            above = tl.full([], FOUND, tl.int64)
        elif here - least < least:  # one id
            high = low
            above = tl.full([], FOUND, tl.int64)
    return high, above


@triton.jit
def _mass(p, unit):
    """Return probabilities as multiples of 1 / unit, rounded down. unit: a power of two."""
    return (p * unit).to(tl.int64)


@triton.jit
def _bin(high, key, BY_COUNT: tl.constexpr, PASS: tl.constexpr):
    """Return the bin of each int32 key, and whether the key is in the bracket below `high`."""
    distance = (high.to(tl.int32) - key).to(tl.uint32, bitcast=True)  # modulo 2^32, and keys span less
    number = (distance >> _shift(BY_COUNT, PASS)).to(tl.int32, bitcast=True)
    return number, (number >= 0) & (number < (1 << (_shift(BY_COUNT, PASS - 1) - _shift(BY_COUNT, PASS))))


@triton.jit
def _load_state(states, r, SLOT: tl.constexpr):
    at = states + 2 * (r.to(tl.int64) * STATES + SLOT)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _store_state(states, r, high, above, SLOT: tl.constexpr):
    """Store a bracket for the next launches. Only the program of the first segment does."""
    at = states + 2 * (r.to(tl.int64) * STATES + SLOT)
    if tl.program_id(1) == 0:
        tl.store(at, high)
        tl.store(at + 1, above)


@triton.jit
def parts_kernel(logits, parts, vocabulary, SEGMENT: tl.constexpr, PARTS: tl.constexpr):
    """Compute parts [R, segments * PARTS] float32: the largest logit of each part. grid (R, segments)."""
    r, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = SEGMENT // PARTS
    column = segment * SEGMENT + tl.arange(0, PARTS)[:, None] * width + tl.arange(0, width)[None, :]
    largest = tl.max(load_logits(logits + r * vocabulary, column, vocabulary), axis=1)
    tl.store(parts + (r * tl.num_programs(1) + segment) * PARTS + tl.arange(0, PARTS), largest)


@triton.jit
def _part_bound(bins, top_k):
    """Return the first bin that, with all bins above, holds the largest logits of at least `top_k` parts.

    At least `top_k` ids are then in these bins, and so is the threshold of top-k. bins: of the largest logit of each
    part.
    """
    low, high = tl.full([], 0, tl.int32), tl.full([], BINS - 1, tl.int32)
    for _ in range(11):
        middle = (low + high) // 2
        is_enough = tl.sum((bins <= middle).to(tl.int32), axis=0) >= top_k
        low = tl.where(is_enough, low, tl.minimum(middle + 1, high))
        high = tl.where(is_enough, middle, high)
    return high


@triton.jit
def count_kernel(
    logits, top_ks, parts, largests, states, counts, vocabulary,
    PASS: tl.constexpr, SEGMENT: tl.constexpr, PARTS: tl.constexpr, ALL_PARTS: tl.constexpr,
):  # fmt: skip
    """Add up the histogram of a pass of top-k: counts [R, 3, BINS] int32. grid (R, segments).

    parts: of `parts_kernel`, ALL_PARTS or fewer for a row. largests [R] float32: the first pass computes it.
    """
    r, segment = tl.program_id(0), tl.program_id(1)
    top_k = tl.load(top_ks + r)
    is_wanted = (top_k > 0) & (top_k < vocabulary)
    bound = tl.full([], BINS - 1, tl.int32)
    counts += r.to(tl.int64) * 3 * BINS
    if PASS == 0:
        num_parts = tl.num_programs(1) * PARTS
        part = tl.arange(0, ALL_PARTS)
        maxima = tl.load(parts + r.to(tl.int64) * num_parts + part, mask=part < num_parts, other=float("-inf"))
        largest = tl.max(maxima, axis=0)
        if segment == 0:
            tl.store(largests + r, largest)
        high, above = _first_bracket(largest, is_wanted, True)
        if is_wanted:
            number, _ = _bin(high, ordered_bits(maxima), True, 0)
            bound = _part_bound(tl.where(part * (SEGMENT // PARTS) < vocabulary, number, BINS), top_k)
    else:
        if PASS == 1:
            high, above = _first_bracket(tl.load(largests + r), is_wanted, True)
        else:
            high, above = _load_state(states, r, PASS - 2)
        high, above = _narrowed(high, above, counts + (PASS - 1) * BINS, top_k.to(tl.float64), 1.0, True, PASS - 1)
        _store_state(states, r, high, above, PASS - 1)
    if above >= 0:
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        key = ordered_bits(load_logits(logits + r.to(tl.int64) * vocabulary, column, vocabulary))
        number, is_inside = _bin(high, key, True, PASS)
        is_counted = is_inside & (number <= bound) & (column < vocabulary)
        tl.atomic_add(counts + PASS * BINS + number, 1, mask=is_counted, sem="relaxed")


@triton.jit
def mass_kernel(
    logits, temperatures, top_ks, top_ps, largests, states, counts, totals, masses, vocabulary, unit,
    PASS: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Add up the histogram of a pass of top-p: masses [R, 3, BINS] int64. grid (R, segments).

    totals [R, segments] int64: the mass of the ids that top-k keeps, which the first pass computes. The mass of a row
    is at least 1. So all ids below (1 - top_p) / V together have less than 1 - top_p of it, and the threshold of top-p
    is above them. Half of this bound leaves room for rounding.
    """
    r, segment = tl.program_id(0), tl.program_id(1)
    top_p, segments = tl.load(top_ps + r), tl.num_programs(1)
    totals += r.to(tl.int64) * segments
    masses += r.to(tl.int64) * 3 * BINS
    high, above = _first_bracket(0.0, top_p < 1, False)
    bound = tl.full([], BINS - 1, tl.int32)
    if PASS == 0:
        lowest, left = _load_state(states, r, 1)
        top_k = tl.load(top_ks + r).to(tl.float64)
        lowest, left = _narrowed(lowest, left, counts + (r.to(tl.int64) * 3 + 2) * BINS, top_k, 1.0, True, 2)
        _store_state(states, r, lowest, left, 2)
        least = (1.0 - top_p) / (2.0 * vocabulary)
        bound, _ = _bin(high, tl.where(top_p < 1, least, 1.0).to(tl.int32, bitcast=True), False, 0)
    else:
        lowest, _ = _load_state(states, r, 2)
        part = tl.arange(0, SEGMENTS)
        total = tl.sum(tl.load(totals + part, mask=part < segments, other=0), axis=0)
        if PASS == 2:
            high, above = _load_state(states, r, 3)
        target = top_p.to(tl.float64) * total.to(tl.float64)
        high, above = _narrowed(high, above, masses + (PASS - 1) * BINS, target, unit, False, PASS - 1)
        _store_state(states, r, high, above, PASS + 2)
    if above >= 0:
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        value = load_logits(logits + r.to(tl.int64) * vocabulary, column, vocabulary)
        is_kept = ordered_bits(value) >= lowest.to(tl.int32)
        p = tl.where(is_kept, _probability(value, tl.load(largests + r), _scale(temperatures, r)), 0.0)
        weight = _mass(p, unit)
        if PASS == 0:
            tl.store(totals + segment, tl.sum(weight, axis=0))
        number, is_inside = _bin(high, p.to(tl.int32, bitcast=True), False, PASS)
        is_counted = is_inside & (number <= bound) & (weight > 0)
        tl.atomic_add(masses + PASS * BINS + number, weight, mask=is_counted, sem="relaxed")


@triton.jit
def kept_kernel(
    logits, temperatures, top_ps, min_ps, largests, states, totals, masses, floors, kept, lasts, vocabulary, unit,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Compute what the filters keep of each segment. grid (R, segments).

    floors [R] float32: the least probability that is kept; kept [R, segments] float64: the mass; lasts [R, segments]
    int32: the last id with any mass, or 0.
    """
    r, segment = tl.program_id(0), tl.program_id(1)
    top_p, segments = tl.load(top_ps + r), tl.num_programs(1)
    high, above = _load_state(states, r, 4)
    if above >= 0:
        part = tl.arange(0, SEGMENTS)
        totals += r.to(tl.int64) * segments
        total = tl.sum(tl.load(totals + part, mask=part < segments, other=0), axis=0)
        target = top_p.to(tl.float64) * total.to(tl.float64)
        high, above = _narrowed(high, above, masses + (r.to(tl.int64) * 3 + 2) * BINS, target, unit, False, 2)
    floor = tl.maximum(tl.minimum(tl.load(min_ps + r), 1.0), high.to(tl.int32).to(tl.float32, bitcast=True))
    if segment == 0:
        tl.store(floors + r, floor)
    lowest, _ = _load_state(states, r, 2)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    value = load_logits(logits + r.to(tl.int64) * vocabulary, column, vocabulary)
    is_kept = ordered_bits(value) >= lowest.to(tl.int32)
    p = tl.where(is_kept, _probability(value, tl.load(largests + r), _scale(temperatures, r)), 0.0)
    p = tl.where(p >= floor, p, 0.0)
    at = r.to(tl.int64) * segments + segment
    tl.store(kept + at, tl.sum(p.to(tl.float64), axis=0))
    tl.store(lasts + at, tl.max(tl.where(p > 0, column, 0), axis=0))


@triton.jit
def draw_kernel(
    logits, temperatures, uniforms, largests, states, floors, kept, lasts, out, vocabulary,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Compute out [R] int32: the first id whose cumulative kept mass exceeds the uniform number of the row.

    If rounding leaves no such id, it is the last id with any mass. grid (R,).
    """
    r = tl.program_id(0)
    largest = tl.load(largests + r)
    if largest == float("-inf"):
        tl.store(out + r, 0)
        return
    segments = tl.cdiv(vocabulary, SEGMENT)
    part = tl.arange(0, SEGMENTS)
    at = r.to(tl.int64) * segments + part
    mass = tl.cumsum(tl.load(kept + at, mask=part < segments, other=0.0), axis=0)
    target = tl.load(uniforms + r) * tl.max(mass, axis=0)
    reached = tl.min(tl.where(mass > target, part, SEGMENTS), axis=0)
    segment = tl.minimum(reached, segments - 1)
    last = tl.load(lasts + at, mask=part < segments, other=0)
    before = tl.sum(tl.where(part == segment - 1, mass, 0.0), axis=0)
    lowest, _ = _load_state(states, r, 2)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    value = load_logits(logits + r.to(tl.int64) * vocabulary, column, vocabulary)
    is_kept = ordered_bits(value) >= lowest.to(tl.int32)
    p = tl.where(is_kept, _probability(value, largest, _scale(temperatures, r)), 0.0)
    p = tl.where(p >= tl.load(floors + r), p, 0.0).to(tl.float64)
    is_beyond = (before + tl.cumsum(p, axis=0) > target) & (p > 0)
    drawn = tl.sum(tl.where(part == segment, last, 0), axis=0)
    drawn = tl.minimum(tl.min(tl.where(is_beyond, column, vocabulary), axis=0), drawn)
    drawn = tl.where(reached < SEGMENTS, drawn, tl.max(last, axis=0))
    tl.store(out + r, drawn)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Compute `Ops.sample` with checked arguments."""
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return out
    segments = triton.cdiv(vocabulary, SEGMENT)
    bins = rows * PASSES * BINS.value
    histograms = torch.zeros(bins + bins // 2, dtype=torch.int64, device=device)
    masses, counts = histograms[:bins], histograms[bins:].view(torch.int32)
    parts = torch.empty((rows, segments * PARTS), dtype=torch.float32, device=device)
    largests, floors = torch.empty((2, rows), dtype=torch.float32, device=device)
    states = torch.empty((rows, STATES.value, 2), dtype=torch.int64, device=device)
    totals = torch.empty((rows, segments), dtype=torch.int64, device=device)
    kept = torch.empty((rows, segments), dtype=torch.float64, device=device)
    lasts = torch.empty((rows, segments), dtype=torch.int32, device=device)
    unit = 2.0 ** (63 - vocabulary.bit_length())
    grid, of_segment = (rows, segments), {"SEGMENT": SEGMENT, "num_warps": 8}
    of_row = of_segment | {"SEGMENTS": triton.next_power_of_2(segments)}
    of_parts = of_segment | {"PARTS": PARTS}

    parts_kernel[grid](logits, parts, vocabulary, **of_parts)
    for number in range(PASSES):
        count_kernel[grid](
            logits, top_k, parts, largests, states, counts, vocabulary,
            PASS=number, ALL_PARTS=triton.next_power_of_2(segments * PARTS), **of_parts,
        )  # fmt: skip
    for number in range(PASSES):
        mass_kernel[grid](
            logits, temperature, top_k, top_p, largests, states, counts, totals, masses, vocabulary, unit,
            PASS=number, **of_row,
        )  # fmt: skip
    kept_kernel[grid](
        logits, temperature, top_p, min_p, largests, states, totals, masses, floors, kept, lasts, vocabulary, unit,
        **of_row,
    )  # fmt: skip
    draw_kernel[(rows,)](logits, temperature, uniform, largests, states, floors, kept, lasts, out, vocabulary, **of_row)
    return out
