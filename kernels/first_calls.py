"""The first call of each of torch's vector functions, made by one thread.

On a CPU torch hands `cos`, `exp` and others of many values to Intel's MKL, a part to each thread. MKL finds the code
for a function when it is first called. If several threads do that at once, one of them may be given code of low
accuracy, for that one call: half of a table is then wrong by 1e-4, in one start of a hundred on a busy machine
(https://github.com/pytorch/pytorch/issues/188792; MKL 2024.2). A worker would keep such a table of rotary embeddings as
long as it lives, and answer differently from its neighbours.
"""

import torch

# Those that ATen/cpu/vml.h of torch 2.13 gives to MKL.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log"),
    *("log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)


def make_first_calls() -> None:
    """Call each on a single value, which is no work for a second thread."""
    for dtype in (torch.float32, torch.float64):
        for name in FUNCTIONS:
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))
