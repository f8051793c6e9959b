"""Attention in plain torch, in place of an attention kernel that gives wrong results on this device.

Sequences are computed one by one, and lengths are read on the host: this is slow, and no CUDA graph can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from quire.kernels.gpu.attention import LayerAttention

# Scores that are computed at a time: 64 MiB of float32. A long prompt has its queries computed in parts.
MOST_SCORES = 1 << 24


def attend_in_torch(
    call: LayerAttention,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    least: int = 1,
    most: int | None = None,
) -> None:
    """Compute the rows of call.out of the sequences that have `least` to `most` queries (None: any number).

    scale: of the scores, in base e. block_tables, seq_lens, query_start: as in `Ops.paged_attention`. Keys and values
    are read from the cache.
    """
    reference = ReferenceOps(call.q.device, call.q.dtype, call.k_cache.dtype)
    starts, out = query_start.tolist(), call.out.flatten(1)
    for s, length in enumerate(seq_lens.tolist()):
        begin, end = starts[s], starts[s + 1]
        if end - begin < least or (most is not None and end - begin > most):
            continue
        if length < end - begin:  # of padding
            out[begin:end] = 0
            continue
        at_once = max(1, MOST_SCORES // (length * call.q.shape[1]))
        first = begin
        while first < end:
            last = min(first + at_once, end)
            if call.key_ends is not None:  # a part ends where an image ends
                last += int(call.key_ends[last - 1]) - (length - (end - last))
            seen = torch.tensor([length - (end - last)], dtype=torch.int32, device=call.q.device)
            queries = torch.tensor([0, last - first], dtype=torch.int32, device=call.q.device)
            reference.paged_attention(
                call.q[first:last], call.k_cache, call.v_cache, block_tables[s : s + 1], seen, queries, scale,
                call.window, out[first:last], None, call.sinks, call.softcap,
                None if call.key_ends is None else call.key_ends[first:last],
            )  # fmt: skip
            first = last
