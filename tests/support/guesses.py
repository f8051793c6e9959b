"""Drafters that know the answers of requests, and are wrong now and then."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from quire.worker.engine.features.drafts.drafter import Draft
from quire.worker.engine.sequence import Sequence

# Token number WRONG - 1 of an answer, and each WRONG tokens after it, is guessed wrong.
WRONG = 5


class Guess:
    """Proposes the rest of an answer, with some wrong tokens."""

    def __init__(self, answer: SequenceOf[int]) -> None:
        self._answer = answer

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        at = sequence.num_output_tokens
        tokens = [
            max(0, token - 1) if place % WRONG == WRONG - 1 else token
            for place, token in enumerate(self._answer[at : at + most], at)
        ]
        return Draft("own", tokens, [1.0] * len(tokens)) if tokens else None


def knowing(answers: Callable[[Sequence], SequenceOf[int]]) -> Callable[..., Guess]:
    """Return what makes the drafter of a sequence, for `Drafts`. answers: the answer of each sequence."""
    return lambda sequence, *_: Guess(answers(sequence))
