"""What a step computes: the running sequences that decode, as columns, and chunks of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.worker.engine.blocks import Copy
from quire.worker.engine.sequence import Sequence


@dataclass(slots=True)
class DecodeBatch:
    """Sequences that take one token each, and what a step needs of them; made anew only when one comes or goes."""

    sequences: list[Sequence]
    rows: np.ndarray  # int64 [R], of the persistent arrays
    token_ids: list[list[int]]  # their own lists
    request_ids: list[str]
    # Whether each is the only sequence of a request whose tokens leave step by step.
    are_single: bool
    # Where those are whose requests ask for log-probabilities.
    with_logprobs: list[int]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> DecodeBatch:
        return cls(
            sequences,
            np.array([sequence.row for sequence in sequences], dtype=np.int64),
            [sequence.token_ids for sequence in sequences],
            [sequence.group.request_id for sequence in sequences],
            all(sequence.group.is_single for sequence in sequences),
            [index for index, sequence in enumerate(sequences) if sequence.group.sampling.logprobs],
        )

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of a sequence that are computed in one step: of a prompt, or of what preemption lost."""

    sequence: Sequence
    num_tokens: int
    # Whether these are the last of its known tokens, so that their logits give the next one.
    is_sampled: bool


@dataclass(slots=True)
class Step:
    """What the runner does in one iteration: moves of blocks, then decodes (one token each), then chunks."""

    decodes: DecodeBatch
    chunks: list[PrefillChunk] = field(default_factory=list)
    # In this order: what is swapped out makes room for what is swapped in, and both for copies.
    swap_out: list[Copy] = field(default_factory=list)
    swap_in: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)
