"""The tokens that penalties apply to, as arrays that grow with a sequence, so that a step does not count them anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

# The arrays grow by at least this many tokens.
LEAST_GROWTH = 16


class SeenTokens:
    """The distinct tokens of a sequence, and how often each was generated.

    prompt: tokens to which the repetition penalty applies although they were not generated; they count 0 times.
    """

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        counts = Counter(dict.fromkeys(prompt, 0))
        counts.update(output)
        # Index of each token in the arrays, which may be longer.
        self._places = {token: place for place, token in enumerate(counts)}
        self._ids = np.fromiter(counts.keys(), np.int32, len(counts))
        self._counts = np.fromiter(counts.values(), np.int32, len(counts))

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> np.ndarray:
        """The tokens, int32 [n], valid until the next `add`."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """The number of times that each was generated, int32 [n], valid until the next `add`."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count one more generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            more = np.zeros(max(LEAST_GROWTH, len(self._ids)), dtype=np.int32)
            self._ids, self._counts = np.concatenate([self._ids, more]), np.concatenate([self._counts, more])
        self._ids[place] = token
        self._counts[place] += 1

    def copy(self) -> SeenTokens:
        copied = SeenTokens((), ())
        copied._places = self._places.copy()
        copied._ids, copied._counts = self._ids.copy(), self._counts.copy()
        return copied
