"""Grammars for the mock model: which tokens are allowed depends on all tokens before, as in a real grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.worker.engine.features.grammars import Grammars, Matcher
from quire.worker.engine.sampler import token_mask
from tests.support.mock_model import EOS, START, VOCAB, advance

# An answer to DEAD_ENDS may come to a point from which the grammar does not continue; an answer to ENDLESS does not.
ENDLESS, DEAD_ENDS = "endless", "dead ends"


class MockMatcher(Matcher):
    """Allows the end token, and half of all other tokens."""

    def __init__(self, grammar: str) -> None:
        self._grammar, self._state, self._has_ended = grammar, START, False

    def copy(self) -> MockMatcher:
        copied = MockMatcher(self._grammar)
        copied._state, copied._has_ended = self._state, self._has_ended
        return copied

    def allowed(self) -> np.ndarray:
        assert not self._has_ended, "an answer that has ended needs no mask"
        assert self.error is None, "an answer without continuation needs no mask"
        return token_mask([EOS, *(token for token in range(VOCAB) if (token * 7 + self._state) % 2)], VOCAB)

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id == EOS or (token_id * 7 + self._state) % 2, "the token was not allowed"
            self._state, self._has_ended = advance(self._state, token_id), token_id == EOS

    @property
    def error(self) -> str | None:
        return "stuck" if self._grammar == DEAD_ENDS and self._state % 7 == 3 else None


class MockGrammars(Grammars):
    """Grammars of MockMatcher."""

    def __init__(self) -> None:
        super().__init__(None, VOCAB, ())

    def matcher(self, grammar: str) -> Matcher:
        return MockMatcher(grammar)
