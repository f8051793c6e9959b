"""Beam search of one request: which beams continue, which have ended, and when no better beam is possible.

Candidates, scores and stopping rules are those of Hugging Face `generate(num_beams=...)`, so that results agree token
for token. Scores are sums of log-probabilities in float32; the score of an ended beam is divided by
length ** length_penalty. `Groups.branch` forks and frees the sequences (paper section 4.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.shared.protocol.messages import Delta, SamplingParams
from quire.shared.protocol.states import OutcomeName
from quire.worker.engine.groups import Groups
from quire.worker.engine.sequence import Sequence, SequenceGroup


class EndedBeam(NamedTuple):
    """A complete output: its ids, including the end token if there is one, and its score for the ranking."""

    token_ids: tuple[int, ...]
    score: float
    finish_reason: str


class Continuation(NamedTuple):
    """A beam of the next step: the index of the beam that it continues, and its new token."""

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
    num_steps: int = 0

    @property
    def num_candidates(self) -> int:
        """Candidates per step: enough for beam_width of them to continue even if every end token is among them."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    def advance(
        self, logprobs: np.ndarray, token_ids: np.ndarray, outputs: list[tuple[int, ...]]
    ) -> list[Continuation] | None:
        """Choose the beams of the next step from the most probable next tokens of each running beam.

        logprobs float32 and token_ids int32: [beams, num_candidates], descending in each row. outputs: the output of
        each beam so far. Returns None if the search is over.
        """
        params, width = self.params, self.params.beam_width
        self.num_steps += 1
        length = len(outputs[0]) + 1
        total = (logprobs + self.scores[:, None]).ravel()
        best = np.argsort(-total, kind="stable")[: self.num_candidates]
        parents, chosen, totals = best // logprobs.shape[1], token_ids.ravel()[best], total[best]
        is_last = length >= params.max_tokens
        is_eos = np.isin(chosen, list(self.eos_token_ids))
        for rank in range(min(width, len(best))):
            # A candidate that ends below the first `width` ranks is ignored, as in Hugging Face.
            if is_last or is_eos[rank]:
                tokens = (*outputs[parents[rank]], int(chosen[rank]))
                self._end(tokens, float(totals[rank]), OutcomeName.STOP if is_eos[rank] else OutcomeName.LENGTH)
        continuing = np.flatnonzero(~is_eos)[:width]
        if is_last or not len(continuing):
            return None
        self.scores = totals[continuing]
        is_full = len(self.ended) >= width
        if is_full and (params.early_stopping == "true" or not self._can_improve(length)):
            return None
        return [Continuation(int(parents[i]), int(chosen[i])) for i in continuing]

    def _end(self, token_ids: tuple[int, ...], total: float, reason: str) -> None:
        score = float(np.float32(total) / np.float32(len(token_ids) ** self.params.length_penalty))
        self.ended.append(EndedBeam(token_ids, score, reason))
        self.ended.sort(key=lambda beam: -beam.score)
        del self.ended[self.params.beam_width :]

    def _can_improve(self, length: int) -> bool:
        """Return whether the best running beam may still beat the worst ended one, by Hugging Face's estimate."""
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.params.max_tokens
        highest: float = float(self.scores[0]) / length**penalty
        return highest > self.ended[-1].score


def continue_beams(
    groups: Groups, group: SequenceGroup, beams: list[Sequence], logprobs: np.ndarray, token_ids: np.ndarray
) -> list[Delta]:
    """Replace the beams of a group by those of its next step. Returns the best beams if the search ends, else nothing.

    logprobs, token_ids: of `BeamSearch.advance`, a row for each of the beams.
    """
    search = group.beams
    assert isinstance(search, BeamSearch)
    continuations = search.advance(logprobs, token_ids, [beam.output for beam in beams])
    if continuations is None:
        for beam in beams:
            beam.finish_reason = OutcomeName.LENGTH
        return best_beams(search.ended[: group.sampling.n])
    groups.branch(group, [continuation.parent for continuation in continuations])
    for beam, continuation in zip(group.sequences, continuations, strict=True):
        beam.token_ids.append(continuation.token_id)
        if beam.seen is not None:
            beam.seen.add(continuation.token_id)
        groups.input_batch.lengths[beam.row] += 1
        groups.input_batch.last_tokens[beam.row] = continuation.token_id
    return []


def best_beams(ended: list[EndedBeam]) -> list[Delta]:
    """Return the results of a beam search, best first."""
    return [Delta(choice, beam.token_ids, beam.finish_reason, None, beam.score) for choice, beam in enumerate(ended)]
