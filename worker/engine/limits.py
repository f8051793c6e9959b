"""Limits of an engine, and the error for a request that exceeds them."""

from __future__ import annotations

from dataclasses import dataclass

# Largest number of positions of prompts that one step scores, since their logits are in memory together. A fixed
# number, because the vocabulary determines the memory per position.
MAX_SCORED_POSITIONS = 256

# Memory for embeddings of images that are kept, on the device of the model.
IMAGE_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine as a whole and of one step.

    max_prefill_tokens: prompt tokens of a step that also decodes; 0: no limit but the token budget. This limit bounds
    the time between two tokens of a running stream.
    num_state_slots: slots for recurrent states: one for each of max_num_seqs, and more for snapshots of the prefix
    cache and for states that are swapped out; 0 for a model without such states. snapshot_interval: tokens between two
    snapshots of a prompt, a multiple of the block size.
    max_pinned_blocks, max_owner_pinned_blocks: bounds of the pins of all calls, and of those of one API key; 0: none.
    preemption: "recompute", "swap", or "auto", which swaps groups and recomputes single sequences (paper section 4.5).
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
    num_state_slots: int = 0
    snapshot_interval: int = 256
    max_pinned_blocks: int = 0
    max_owner_pinned_blocks: int = 0


class RequestRefused(ValueError):
    """A request that could not run even in an empty engine. The message names the limit and the excess."""
