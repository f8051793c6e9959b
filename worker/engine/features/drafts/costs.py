"""The number of tokens to draft: as many as make the expected tokens per second of a step the highest.

A step of `rows` positions takes `StepCosts.seconds(rows)`, measured at start. A drafted token is accepted with a
probability that is learnt from the sequence's own drafts. Drafted tokens are taken in the order of that probability,
over all sequences, while the expected number of new tokens divided by the time of the step grows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from functools import lru_cache


class StepCosts:
    """The time of a step by its number of positions: a line between measured numbers, and never falling.

    measured: numbers of positions, ascending from 1, and seconds. overhead_s: seconds of a step on the host, whatever
    it computes.
    """

    def __init__(self, measured: dict[int, float], overhead_s: float = 0.0) -> None:
        self._rows = list(measured)
        self._seconds: list[float] = []
        for seconds in measured.values():
            self._seconds.append(max(seconds + overhead_s, *self._seconds[-1:], 1e-9))
        self.most = self._rows[-1]
        self.seconds = lru_cache(maxsize=4096)(self._seconds_of)

    def _seconds_of(self, rows: int) -> float:
        at = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        if at == 0:
            return self._seconds[0]
        low, high = self._rows[at - 1], self._rows[at]
        first, second = self._seconds[at - 1], self._seconds[at]
        return first + (second - first) * (rows - low) / (high - low)

    def __str__(self) -> str:
        return ", ".join(f"{rows}: {1e3 * s:.2f} ms" for rows, s in zip(self._rows, self._seconds, strict=True))


def choose_lengths(
    survivals: SequenceOf[SequenceOf[float]], num_decoding: int, num_rows: int, most: int, costs: StepCosts
) -> list[int]:
    """Return how many tokens of each draft to compute.

    survivals: for each draft the probabilities that its first 1, 2, 3 ... tokens are all accepted, never rising.
    num_decoding: sequences that get a token in the step anyway. num_rows: positions of the step without drafts.
    most: drafted tokens in all.
    """
    flat = sorted(((p, index) for index, draft in enumerate(survivals) for p in draft), key=lambda entry: -entry[0])
    expected, best, count = float(num_decoding), num_decoding / costs.seconds(num_rows), 0
    for drafted, (probability, _) in enumerate(flat[: min(most, costs.most - num_rows)], 1):
        expected += probability
        rate = expected / costs.seconds(num_rows + drafted)
        if rate > best:
            best, count = rate, drafted
    lengths = [0] * len(survivals)
    for _, index in flat[:count]:
        lengths[index] += 1
    return lengths


def may_pay(num_decoding: int, num_rows: int, most: int, costs: StepCosts) -> bool:
    """Return whether any drafts could pay, if they were all accepted."""
    best = num_decoding / costs.seconds(num_rows)
    ends = range(1, min(most, costs.most - num_rows) + 1)
    return any((num_decoding + drafted) / costs.seconds(num_rows + drafted) > best for drafted in ends)
