"""Functions that all kernels over logits call, and argmax. One program reads a row, in blocks of the vocabulary."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_logits(row, column, vocabulary):
    """Load logits as float32: NaN and columns beyond the vocabulary as minus infinity, minus zero as zero."""
    value = tl.load(row + column, mask=column < vocabulary, other=float("-inf"))
    value = tl.where(value == value, value, float("-inf"))
    return tl.where(value == 0, 0.0, value)


@triton.jit
def ordered_bits(value):
    """Map float32, without NaN, to int32 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def row_largest(row, vocabulary, BLOCK: tl.constexpr):
    """Return the largest logit of a row."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        largest = tl.maximum(largest, load_logits(row, start + tl.arange(0, BLOCK), vocabulary))
    return tl.max(largest, axis=0)


@triton.jit
def argmax_kernel(logits, out, vocabulary, BLOCK: tl.constexpr):
    """Compute out [R] int32 from logits [R, vocabulary] float32: the lowest id of the largest logits. grid (R,)."""
    row = logits + tl.program_id(0).to(tl.int64) * vocabulary
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.arange(0, BLOCK)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=4):  # prefetches: a single row waits for memory
        column = start + tl.arange(0, BLOCK)
        value = load_logits(row, column, vocabulary)
        best_id = tl.where(value > best, column, best_id)
        best = tl.maximum(best, value)
    largest = tl.max(best, axis=0)
    tl.store(out + tl.program_id(0), tl.min(tl.where(best == largest, best_id, vocabulary - 1), axis=0))


def argmax(logits: Tensor) -> Tensor:
    """Return the id of the largest of logits [R, V], as [R] int32."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        argmax_kernel[(rows,)](logits, out, vocabulary, BLOCK=4096, num_warps=8)
    return out
