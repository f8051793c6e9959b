"""Log-probabilities: the normaliser of a row in float64, and the best ids by one int64 key per logit.

The upper 32 bits of a key are the logit in integer order, the lower bits the inverted id. Keys are distinct, and the
larger key has the larger logit or, of equal logits, the lower id. So a selection of keys has no ties.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.logits import load_logits, ordered_bits, row_largest

BLOCK = 4096
KEY_BYTES = 1 << 25  # memory for keys: of 256 rows of 152k logits all keys would take 311 MB


@triton.jit
def normaliser_kernel(logits, largest_out, log_sum_out, vocabulary, BLOCK: tl.constexpr):
    """Compute the largest logit [R] float32 and log(sum(exp(logit - largest))) [R] float64 of logits [R, vocabulary].

    Terms equal to 1 are counted separately: if one logit has nearly all of the mass, the sum of the rest would be lost.
    grid (R,).
    """
    row = logits + tl.program_id(0).to(tl.int64) * vocabulary
    largest = row_largest(row, vocabulary, BLOCK)
    rest = tl.zeros([BLOCK], tl.float64)
    equals = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = load_logits(row, column, vocabulary)
        is_largest = (value == largest) & (column < vocabulary)
        shifted = tl.where(is_largest, 0.0, value.to(tl.float64) - largest.to(tl.float64))
        # If all logits are minus infinity, lanes beyond the vocabulary would compute infinity minus itself.
        rest += tl.where(is_largest | (value == float("-inf")), 0.0, tl.exp(shifted))
        equals += is_largest.to(tl.int32)
    x = tl.sum(rest, axis=0) + (tl.sum(equals, axis=0) - 1).to(tl.float64)
    # log(1 + x) to full precision for small x (Higham, Accuracy and Stability of Numerical Algorithms, section 1.14.1)
    u = 1.0 + x
    log_sum = tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
    tl.store(largest_out + tl.program_id(0), largest)
    tl.store(log_sum_out + tl.program_id(0), log_sum)


@triton.jit(do_not_specialize=["count"])
def pick_kernel(logits, ids, largest, log_sum, out, vocabulary, count, BLOCK: tl.constexpr):
    """Compute out [R, count] float32: the log-probabilities of ids [R, count]; NaN for an id outside 0..vocabulary - 1.

    grid (R, cdiv(count, BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token = tl.load(ids + row * count + i, mask=inside, other=0).to(tl.int64)
    exists = (token >= 0) & (token < vocabulary)
    value = load_logits(logits + row * vocabulary, tl.where(exists, token, 0), vocabulary)
    most = tl.load(largest + row)
    shifted = tl.where(value == most, 0.0, value.to(tl.float64) - most.to(tl.float64))
    result = (shifted - tl.load(log_sum + row)).to(tl.float32)
    result = tl.where(value == float("-inf"), value, result)
    tl.store(out + row * count + i, tl.where(exists, result, float("nan")), mask=inside)


@triton.jit
def keys_kernel(logits, keys, vocabulary, BLOCK: tl.constexpr):
    """Compute keys [R, vocabulary] int64 of logits of the same shape. grid (R, cdiv(vocabulary, BLOCK))."""
    at = tl.program_id(0).to(tl.int64) * vocabulary
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = ordered_bits(load_logits(logits + at, column, vocabulary)).to(tl.int64)
    tl.store(keys + at + column, (value << 32) | (0x7FFFFFFF - column).to(tl.int64), mask=column < vocabulary)


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of ids [R, count] as [R, count] float32."""
    rows, vocabulary = logits.shape
    count = ids.shape[1]
    out = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    if rows:
        largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
        log_sum = torch.empty(rows, dtype=torch.float64, device=logits.device)
        normaliser_kernel[(rows,)](logits, largest, log_sum, vocabulary, BLOCK=BLOCK, num_warps=8)
        pick_kernel[(rows, triton.cdiv(count, 256))](
            logits, ids, largest, log_sum, out, vocabulary, count, BLOCK=256, num_warps=2
        )
    return out


def best_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest logits of each row, [R, count] int32; of equal logits the lower id first.

    `topk` selects keys by radix, without sorting whole rows. The keys of at most KEY_BYTES exist at a time.
    """
    rows, vocabulary = logits.shape
    at_once = max(1, KEY_BYTES // (8 * vocabulary))
    best = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    keys = torch.empty((min(rows, at_once), vocabulary), dtype=torch.int64, device=logits.device)
    for part, largest in zip(torch.split(logits, at_once), torch.split(best, at_once), strict=True):
        if len(part):
            keys_kernel[(len(part), triton.cdiv(vocabulary, BLOCK))](part, keys, vocabulary, BLOCK=BLOCK)
            largest.copy_(keys[: len(part)].topk(count, dim=-1, sorted=True).values)
    return (0x7FFFFFFF - (best & 0x7FFFFFFF)).int()
