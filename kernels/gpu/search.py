"""Binary search on the device."""

import triton
import triton.language as tl


@triton.jit
def owner(starts, at, count, steps, STRIDE: tl.constexpr):
    """Per lane the last i in [0, count) with starts[i * STRIDE] <= at; starts ascend, starts[0] <= at.

    steps is count.bit_length().
    """
    low = tl.zeros_like(at)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(starts + middle * STRIDE) <= at
        narrow = high - low > 1
        low = tl.where(narrow & below, middle, low)
        high = tl.where(narrow & ~below, middle, high)
    return low
