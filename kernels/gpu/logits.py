"""Functions that all kernels over logits call, and argmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 8192  # logits of a program, where several programs read a row


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
def best_of_segment_kernel(logits, best, vocabulary, SEGMENT: tl.constexpr):
    """Compute best [R, segments] int64 of logits [R, vocabulary] float32. grid (R, segments).

    The upper 32 bits are the largest logit of the segment in integer order, the lower bits its lowest id, inverted. So
    the largest number of a row names the lowest id of its largest logits.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    value = load_logits(logits + row * vocabulary, column, vocabulary)
    largest = tl.max(value, axis=0)
    lowest = tl.min(tl.where(value == largest, column, vocabulary), axis=0)
    key = (ordered_bits(largest).to(tl.int64) << 32) | (0x7FFFFFFF - lowest).to(tl.int64)
    tl.store(best + row * tl.num_programs(1) + segment, key)


@triton.jit
def argmax_kernel(best, out, segments, SEGMENTS: tl.constexpr):
    """Compute out [R] int32 from best [R, segments], of `best_of_segment_kernel`. grid (R,)."""
    segment = tl.arange(0, SEGMENTS)
    at = tl.program_id(0).to(tl.int64) * segments + segment
    key = tl.max(tl.load(best + at, mask=segment < segments, other=-(2**63)), axis=0)
    tl.store(out + tl.program_id(0), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32))


def argmax(logits: Tensor) -> Tensor:
    """Return the id of the largest of logits [R, V], as [R] int32.

    Several programs read a row. Comparisons are exact, so the split does not change the result.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        segments = triton.cdiv(vocabulary, SEGMENT)
        best = torch.empty((rows, segments), dtype=torch.int64, device=logits.device)
        best_of_segment_kernel[(rows, segments)](logits, best, vocabulary, SEGMENT=SEGMENT, num_warps=8)
        argmax_kernel[(rows,)](best, out, segments, SEGMENTS=triton.next_power_of_2(segments), num_warps=1)
    return out
