"""Reasoning that ends: after its budget of tokens, the only allowed tokens are those of the marker that ends it.

What is allowed depends on the tokens so far and nothing else. So the reasoning of a request that continues on another
worker ends at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.sampler import token_mask
from quire.worker.engine.sequence import GrammarState

# Tokens, such as line breaks, that may come before the marker that begins the reasoning.
MAX_LEAD = 4


class BoundedReasoning:
    """The state of one sequence in its reasoning, and in the grammar of its answer, if that has one."""

    def __init__(
        self, sampling: SamplingParams, vocab_size: int, grammar: GrammarState | None, output: Sequence[int]
    ) -> None:
        """output: the tokens so far. grammar: its state after them."""
        self._budget, self._marker = sampling.thinking_token_budget, sampling.thinking_end
        self._masks = [token_mask((token,), vocab_size) for token in self._marker]
        self._start = list(sampling.thinking_start)
        self._grammar = grammar
        self._lead: list[int] = []  # the tokens before the reasoning, and the marker that begins it
        self._used = 0  # tokens of the reasoning
        self._written = 0  # tokens of the marker that ends it and had to come
        self._is_inside, self._is_over = not self._start, False
        for token_id in output:
            self._advance(token_id)

    @property
    def error(self) -> str | None:
        return self._grammar.error if self._grammar is not None else None

    def _ends_here(self, by_grammar: np.ndarray | None) -> bool:
        """Return whether the marker must come. by_grammar: the mask of the grammar, None without one.

        It comes later if the grammar does not allow it here, in the middle of a character.
        """
        if not self._is_inside or self._is_over or self._used < self._budget:
            return False
        first = self._marker[0]
        return bool(self._written or by_grammar is None or by_grammar[first // 32] >> (first % 32) & 1)

    def allowed(self) -> np.ndarray | None:
        """Return the allowed next tokens as a bit mask, as grammars do; None if all are allowed."""
        by_grammar = self._grammar.allowed() if self._grammar is not None else None
        return self._masks[self._written] if self._ends_here(by_grammar) else by_grammar

    def forced(self) -> list[int]:
        """Return the tokens that any answer continues with."""
        if self._grammar is None:
            return list(self._marker[self._written :]) if self._ends_here(None) else []
        return self._grammar.forced()

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens."""
        for token_id in token_ids:
            self._advance(token_id)
        if self._grammar is not None:
            self._grammar.consume(token_ids)

    def _advance(self, token_id: int) -> None:
        if self._is_over:
            return
        if not self._is_inside:
            self._lead.append(token_id)
            self._is_inside = self._lead[-len(self._start) :] == self._start
            self._is_over = not self._is_inside and len(self._lead) >= MAX_LEAD + len(self._start)
        elif self._written or (token_id == self._marker[0] and self._used >= self._budget):
            self._written += 1
            self._is_over = self._written == len(self._marker)
        elif token_id == self._marker[0]:
            self._is_over = True
        else:
            self._used += 1


def with_budget(
    sampling: SamplingParams, vocab_size: int, grammar: GrammarState | None, output: Sequence[int]
) -> GrammarState | None:
    """Return what restricts the next token of a choice: its reasoning, if that has a budget, or its grammar, if any.

    output: the tokens so far. grammar: its state after them.
    """
    if sampling.thinking_token_budget < 0 or not sampling.thinking_end:
        return grammar
    return BoundedReasoning(sampling, vocab_size, grammar, output)
