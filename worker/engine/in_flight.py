"""A step that has been launched and whose tokens the host may not know yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.scoring import TokenScores
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.step import DecodeBatch
from quire.worker.engine.transfers import SampledTokens


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """The sequences that get a token in a step, with their state at its launch. Arrays are [R]."""

    batch: DecodeBatch
    tokens: SampledTokens | np.ndarray  # int32; an array if the host waited for the step
    lengths: np.ndarray  # int32, tokens of each sequence before this one
    prompt_lengths: np.ndarray  # int32
    is_last: np.ndarray  # bool: with this token the sequence reaches max_tokens
    is_watched: np.ndarray  # bool: stop strings, stop tokens or repetition may end the sequence
    heeds_eos: np.ndarray  # bool: an end token ends the sequence
    # Log-probabilities of the tokens, if they are on their way too.
    scores: TokenScores | None = None
    # Indices into `tokens` of the sequences in `batch`; None for all.
    kept: np.ndarray | None = None
    # Sequences that ended with their token of this step, once the tokens are collected.
    ended: list[Sequence] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        batch: DecodeBatch,
        tokens: SampledTokens | np.ndarray,
        input_batch: InputBatch,
        scores: TokenScores | None = None,
    ) -> InFlightStep:
        """Count one more token for each sequence of the batch, whatever token it is."""
        rows = batch.rows
        lengths = input_batch.lengths[rows]
        input_batch.lengths[rows] = lengths + 1
        return cls(
            batch=batch,
            tokens=tokens,
            lengths=lengths,
            prompt_lengths=input_batch.prompt_lengths[rows],
            is_last=lengths + 1 >= input_batch.max_lengths[rows],
            is_watched=input_batch.is_watched[rows],
            heeds_eos=~input_batch.ignores_eos[rows],
            scores=scores,
        )

    def without(self, ended: list[Sequence]) -> InFlightStep:
        """Return this step without sequences that had ended before it: they took part in one step too many."""
        if not ended:
            return self
        gone = set(ended)
        kept = np.array([i for i, sequence in enumerate(self.batch.sequences) if sequence not in gone], dtype=np.int64)
        return InFlightStep(
            batch=DecodeBatch.of([self.batch.sequences[i] for i in kept]),
            tokens=self.tokens,
            lengths=self.lengths[kept],
            prompt_lengths=self.prompt_lengths[kept],
            is_last=self.is_last[kept],
            is_watched=self.is_watched[kept],
            heeds_eos=self.heeds_eos[kept],
            scores=self.scores,
            kept=kept,
        )

    def wait(self) -> np.ndarray:
        """Wait for the device, and record log-probabilities. Returns the token of each sequence: int32 [R]."""
        if self.scores is not None:  # first, because they are copied last: the host waits once
            self.scores.record(self.batch.sequences, self.kept)
        tokens = self.tokens.wait() if isinstance(self.tokens, SampledTokens) else self.tokens
        return tokens if self.kept is None else tokens[self.kept]
