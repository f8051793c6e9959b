"""Beam search of one request: which beams go on, which have ended, and when no better one can come.

The candidates, scores and stopping rules are those of Hugging Face `generate(num_beams=...)`, so that results agree
token for token. Scores are sums of log-probabilities in float32; that of an ended beam is divided by
length ** length_penalty. Only ids and numbers here: the scheduler forks and drops the sequences (paper section 4.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.shared.messages import SamplingParams


class EndedBeam(NamedTuple):
    """A complete output: its ids with the end token if there was one, and the score it is ranked by."""

    token_ids: tuple[int, ...]
    score: float
    finish_reason: str


class Continuation(NamedTuple):
    """A beam of the next step: which of the present ones it continues, and with which token."""

    parent: int
    token_id: int


@dataclass(slots=True)
class BeamSearch:
    """The state of a search over `params.beam_width` beams."""

    params: SamplingParams
    eos_token_ids: frozenset[int]
    # Sums of log-probabilities of the running beams, best first.
    scores: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.float32))
    ended: list[EndedBeam] = field(default_factory=list)  # best first, at most beam_width

    @property
    def num_candidates(self) -> int:
        """Continuations that are looked at: so many that beam_width of them do not end here, whatever the others do."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    def advance(
        self, logprobs: np.ndarray, token_ids: np.ndarray, outputs: list[tuple[int, ...]]
    ) -> list[Continuation] | None:
        """Take the most probable next tokens of each running beam; None if the search is over.

        logprobs float32 and token_ids int32: [beams, num_candidates], descending in each row. outputs: what each beam
        has drawn so far.
        """
        params, width = self.params, self.params.beam_width
        length = len(outputs[0]) + 1
        total = (logprobs + self.scores[:, None]).ravel()
        best = np.argsort(-total, kind="stable")[: self.num_candidates]
        parents, chosen, totals = best // logprobs.shape[1], token_ids.ravel()[best], total[best]
        is_last = length >= params.max_tokens
        is_eos = np.isin(chosen, list(self.eos_token_ids))
        for rank in range(min(width, len(best))):
            # What ends below the first places is not considered; it only leaves room for those that go on.
            if is_last or is_eos[rank]:
                tokens = (*outputs[parents[rank]], int(chosen[rank]))
                self._end(tokens, float(totals[rank]), "stop" if is_eos[rank] else "length")
        going_on = np.flatnonzero(~is_eos)[:width]
        if is_last or not len(going_on):
            return None
        self.scores = totals[going_on]
        is_full = len(self.ended) >= width
        if is_full and (params.early_stopping == "true" or not self._can_improve(length)):
            return None
        return [Continuation(int(parents[i]), int(chosen[i])) for i in going_on]

    def _end(self, token_ids: tuple[int, ...], total: float, reason: str) -> None:
        score = float(np.float32(total) / np.float32(len(token_ids) ** self.params.length_penalty))
        self.ended.append(EndedBeam(token_ids, score, reason))
        self.ended.sort(key=lambda beam: -beam.score)
        del self.ended[self.params.beam_width :]

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam might still beat the worst ended one, by Hugging Face's estimates."""
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.params.max_tokens
        return float(self.scores[0]) / length**penalty > self.ended[-1].score
