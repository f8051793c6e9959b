"""A step that was launched and whose tokens are, or may be, still unknown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.worker.device.staging import SampledTokens
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.step import DecodeBatch


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Who draws a token in a step, and what was known of them then. Arrays are [R]."""

    active: DecodeBatch
    tokens: SampledTokens | np.ndarray
    lengths: np.ndarray  # tokens that each had
    prompt_lengths: np.ndarray
    # Whether this token is the last that was asked for; whether its text is looked at; whether an end token ends it.
    is_last: np.ndarray
    is_watched: np.ndarray
    heeds_eos: np.ndarray

    @classmethod
    def launch(cls, active: DecodeBatch, tokens: SampledTokens | np.ndarray, rows: InputBatch) -> InFlightStep:
        """Note that these sequences have one token more, whatever it is."""
        at = active.rows
        lengths = rows.lengths[at]
        rows.lengths[at] = lengths + 1
        is_last = lengths + 1 >= rows.max_lengths[at]
        return cls(
            active, tokens, lengths, rows.prompt_lengths[at], is_last, rows.is_watched[at], ~rows.ignores_eos[at]
        )

    def without(self, gone: set[Sequence]) -> tuple[InFlightStep, np.ndarray]:
        """What is left of it without some sequences, and where that was."""
        at = np.array([i for i, one in enumerate(self.active.sequences) if one not in gone], dtype=np.int64)
        arrays = (self.lengths, self.prompt_lengths, self.is_last, self.is_watched, self.heeds_eos)
        kept = DecodeBatch.of([self.active.sequences[i] for i in at])
        return InFlightStep(kept, self.tokens, *(array[at] for array in arrays)), at
