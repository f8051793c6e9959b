"""Calls each of torch's vector functions once, on one thread, before several threads can.

On a CPU, torch splits large `cos`, `exp` and similar calls over its threads, and each thread calls Intel's MKL. MKL
selects the code of a function at its first call. If several threads make that first call at the same time, MKL may give
one of them code of low accuracy for that call: part of a table is then wrong by 1e-4, in about one start of a hundred
on a busy machine (https://github.com/pytorch/pytorch/issues/188792; MKL 2024.2). A worker would keep such a table of
rotary embeddings for its lifetime and answer differently from other workers.
"""

import torch

# The functions that ATen/cpu/vml.h of torch 2.13 passes to MKL.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log"),
    *("log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)


def warm_up_mkl() -> None:
    """Call each function on one value, too little work for a second thread, in float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        for name in FUNCTIONS:
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))
