"""Binary search on the device, called by other kernels."""

import triton
import triton.language as tl


@triton.jit
def owner(starts, at, count, steps, STRIDE: tl.constexpr):
    """Return, for each lane, the last i in [0, count) with starts[i * STRIDE] <= at.

    starts ascend, and starts[0] <= at. steps: count.bit_length().
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
