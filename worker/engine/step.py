"""The work of one step: running sequences that decode, as columns, and chunks of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.worker.engine.blocks import Copy
from quire.worker.engine.sequence import LOWEST_PRIORITY, Sequence


@dataclass(slots=True)
class DecodeBatch:
    """Sequences that get one token each, and their columns. Built anew only when a sequence joins or leaves."""

    sequences: list[Sequence]
    rows: np.ndarray  # int64 [R], rows of the input batch
    token_ids: list[list[int]]  # the sequences' own lists
    request_ids: list[str]
    # True if the group of a sequence is of the lowest class.
    has_lowest: bool
    # True if each is the only sequence of a request that streams its tokens.
    are_single: bool
    # Indices of the sequences whose requests ask for log-probabilities.
    with_logprobs: list[int]
    # Indices of the sequences whose logits depend on the tokens so far: penalties, banned words, grammars.
    with_history: list[int]
    # Indices of the sequences whose requests have had no result yet. The list is cleared with the first results.
    without_report: list[int]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> DecodeBatch:
        return cls(
            sequences,
            np.array([sequence.row for sequence in sequences], dtype=np.int64),
            [sequence.token_ids for sequence in sequences],
            [sequence.group.request_id for sequence in sequences],
            any(sequence.group.priority == LOWEST_PRIORITY for sequence in sequences),
            all(sequence.group.is_single for sequence in sequences),
            [index for index, sequence in enumerate(sequences) if sequence.group.sampling.logprobs],
            [index for index, sequence in enumerate(sequences) if sequence.group.has_history],
            [index for index, sequence in enumerate(sequences) if not sequence.group.is_reported],
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def append_tokens(self, token_ids: Iterable[int]) -> None:
        """Append one token to each sequence."""
        _call_each(list.append, self.token_ids, token_ids)

    def set_tokens(self, positions: Iterable[int], token_ids: Iterable[int]) -> None:
        """Write one token of each sequence at a position that it has already."""
        _call_each(list.__setitem__, self.token_ids, positions, token_ids)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of one sequence that a step computes: a part of its prompt, or of what preemption discarded."""

    sequence: Sequence
    num_tokens: int
    # True if the sequence has no known tokens after these, so that their logits give the next one.
    is_sampled: bool
    # Positions whose logits score tokens of the prompt; the first one is `prompt_scores.num_scored` of the group.
    num_scored: int = 0
    # Copies of the recurrent state: the number of tokens of the chunk before each, and its slot.
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def num_pooled(self) -> int:
        """Number of last tokens of the chunk whose hidden states the embedding of the prompt needs."""
        sequence = self.sequence
        if sequence.group.pooling == "mean":
            return self.num_tokens
        if sequence.group.pooling == "last":
            return int(sequence.num_computed + self.num_tokens == len(sequence.token_ids))
        return 0


@dataclass(slots=True)
class Verification:
    """A decoding sequence that computes its newest token and, after it, drafted tokens.

    The logits of each of these positions give the token that follows. A drafted token is accepted if it is the token
    that the logits before it give. accepted: the number of these tokens, known after the step.
    """

    sequence: Sequence
    draft: tuple[int, ...]
    accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return 1 + len(self.draft)


@dataclass(slots=True)
class Step:
    """One iteration of the engine: moves of blocks, then decodes (one token each), chunks of prompts, verifications."""

    decodes: DecodeBatch
    chunks: list[PrefillChunk] = field(default_factory=list)
    # Decoding sequences with drafted tokens; they are not in `decodes`.
    verifications: list[Verification] = field(default_factory=list)
    # Done in this order: blocks swapped out make room for blocks swapped in, and both for copies.
    swap_out: list[Copy] = field(default_factory=list)
    swap_in: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    # Positions of all chunks whose logits score tokens of prompts.
    num_scored: int = 0
    # For models with recurrent states: copies of slots, in this order, before anything is computed; and copies of the
    # states of decodes, by index, to slots afterwards.
    state_copies: list[Copy] = field(default_factory=list)
    decode_snapshots: list[tuple[int, int]] = field(default_factory=list)
    # A `forward_batch.TokenEmbeddings` of the image tokens of chunks, if there are any.
    embeddings: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens + self.num_verified

    @property
    def num_verified(self) -> int:
        """Positions of all verifications, each of which gives logits."""
        return sum(verification.num_tokens for verification in self.verifications) if self.verifications else 0

    @property
    def num_decoding(self) -> int:
        """Sequences that decode, with drafted tokens or without."""
        return len(self.decodes) + len(self.verifications)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted, known after the step."""
        return sum(verification.accepted for verification in self.verifications)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


def _call_each(function: Callable[..., object], *columns: Iterable[object]) -> None:
    """Call a function with the elements of all columns, one row after the other.

    The loop runs in C: a deque without room consumes `map` and keeps nothing. A Python loop would take several times as
    long, and these loops are among the few costs of a step that grow with the number of sequences.
    """
    deque(map(function, *columns), maxlen=0)
