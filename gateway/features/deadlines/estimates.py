"""Deadlines at a gateway: the expected length of an answer, and the pace of the lane.

Redis decides from it when the request is submitted, and when a worker claims it (`_deadlines.lua`).
docs/deadlines.md describes the feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.shared.protocol.broker import Admission
from quire.shared.protocol.messages import GenerationRequest, WorkerCard
from quire.shared.protocol.pace import Pace, lane_pace


class WorkerCards(Protocol):
    """The workers that are alive (`WorkerRegistry`)."""

    workers: tuple[WorkerCard, ...]


class Deadlines:
    """Estimates for the calls of one model."""

    def __init__(self, live: WorkerCards, is_on: bool) -> None:
        self._live = live
        self._is_on = is_on

    def estimated(self, requests: Sequence[GenerationRequest], terms: Admission) -> Admission:
        """Return the terms of a call with its expected answer and the pace of the lane, if it has a deadline."""
        if not self._is_on or not terms.deadline_ms:
            return terms
        paces = [card.pace for card in self._live.workers]
        return terms._replace(answer=expected_answer(requests[0], paces), pace=lane_pace(paces))


def expected_answer(request: GenerationRequest, paces: Sequence[Pace]) -> int:
    """Return how long an answer is expected to be, in tokens: exact if it ignores end tokens, else as half of the
    answers at the worker whose answers are shortest."""
    sampling = request.sampling
    if request.pooling:
        return 0
    if sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids or sampling.repetition_detection):
        return sampling.max_tokens
    usual = min((pace.answer for pace in paces), default=0)
    return min(sampling.max_tokens, max(sampling.min_tokens, usual))
