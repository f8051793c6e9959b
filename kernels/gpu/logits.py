"""What all kernels over logits share. A row is one program, which goes over the vocabulary in blocks."""

import triton
import triton.language as tl


@triton.jit
def load_logits(row, column, vocabulary):
    """float32, NaN and what lies beyond the vocabulary as minus infinity, minus zero as zero."""
    value = tl.load(row + column, mask=column < vocabulary, other=float("-inf"))
    value = tl.where(value == value, value, float("-inf"))
    return tl.where(value == 0, 0.0, value)


@triton.jit
def ordered_bits(value):
    """float32 -> int32 in the same order, for what is not NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def row_largest(row, vocabulary, BLOCK: tl.constexpr):
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        largest = tl.maximum(largest, load_logits(row, start + tl.arange(0, BLOCK), vocabulary))
    return tl.max(largest, axis=0)


@triton.jit
def argmax_kernel(logits, out, vocabulary, BLOCK: tl.constexpr):
    """logits [R, vocabulary] float32 -> out [R] int32, the lowest id among equals. grid (R,)."""
    row = logits + tl.program_id(0).to(tl.int64) * vocabulary
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.arange(0, BLOCK)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=4):  # fetched ahead: one row alone waits for memory
        column = start + tl.arange(0, BLOCK)
        value = load_logits(row, column, vocabulary)
        best_id = tl.where(value > best, column, best_id)
        best = tl.maximum(best, value)
    largest = tl.max(best, axis=0)
    tl.store(out + tl.program_id(0), tl.min(tl.where(best == largest, best_id, vocabulary - 1), axis=0))
