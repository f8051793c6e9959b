"""What an engine can hold, and the error of a request that goes beyond it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can hold at once, and in one step; and how it behaves at these limits.

    max_prefill_tokens: prompt tokens of a step in which others decode, 0 for all that the budget leaves. It bounds the
    time between two tokens of a running stream.
    preemption: "recompute", "swap", or "auto": groups are swapped, single sequences recomputed (paper section 4.5).
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_host_blocks: int = 0
    prefix_caching: bool = True
    max_prefill_tokens: int = 0
    preemption: str = "auto"


class RequestRefused(ValueError):
    """A request that could never run here, however empty the engine: which limit, and by how much."""
