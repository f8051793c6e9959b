"""Log-probabilities of the tokens of a prompt, computed chunk by chunk while the prompt is computed.

The logits of position p score the token at p + 1, so the last position of a prompt scores nothing and the first token
has no score. A preempted group keeps its scores: positions that were scored are computed again without logits, or
found in the prefix cache. Positions without scores are never taken from the cache, because it has no logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class PromptScores:
    """The scores of one prompt.

    prompt: its tokens. top: the number of most probable tokens whose log-probabilities are recorded, too.
    records: of the positions scored so far (`quire.shared.protocol.prompt_logprobs`).
    """

    prompt: tuple[int, ...]
    top: int
    num_scored: int = 0
    records: bytearray = field(default_factory=bytearray)

    @property
    def is_complete(self) -> bool:
        return self.num_scored >= len(self.prompt) - 1

    def max_tokens(self, start: int, positions: int) -> int:
        """Return how many tokens from `start` on a chunk may have if it scores at most this many positions.

        start: a token up to which all tokens have been scored.
        """
        end = self.num_scored + positions
        return max(0, end - start) if end < len(self.prompt) - 1 else len(self.prompt)

    def num_positions(self, end: int) -> int:
        """Return how many positions a chunk that ends before token `end` scores."""
        return max(0, min(end, len(self.prompt) - 1) - self.num_scored)

    def add(self, records: bytes, count: int) -> None:
        """Append the records of `count` positions."""
        self.records += records
        self.num_scored += count


def score_prompts(parts: list[tuple[PromptScores, int]], records: Callable[[list[int], int], np.ndarray]) -> None:
    """Add the records of the positions that a step has computed.

    parts: scores of a prompt, and the number of positions that the step adds to them. records: returns the words of
    the records of these tokens, one for each position of the step, with a number of most probable tokens.
    """
    targets = [token for scores, count in parts for token in scores.prompt[scores.num_scored + 1 :][:count]]
    words = records(targets, max(scores.top for scores, _ in parts))
    at = 0
    for scores, count in parts:
        scores.add(words[at : at + count, : 2 + 2 * scores.top].tobytes(), count)
        at += count
