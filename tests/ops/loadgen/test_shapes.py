"""Lengths of prompts and answers, and times of arrivals."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from statistics import mean, stdev

import pytest

from quire.ops.loadgen.shapes import SHAPES, arrivals, lengths

# Mean tokens of prompts and answers as published: the paper's section 6.1, and Azure's traces of 2023.
PUBLISHED = {
    "sharegpt": (161.31, 337.99),
    "alpaca": (19.31, 58.45),
    "azure-chat": (1155, 211),
    "azure-code": (2048, 28),
}


LONGEST = {"sharegpt": (1024, 2048), "alpaca": (1024, 2048), "azure-chat": (14_050, 1000), "azure-code": (7437, 1899)}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("count", "tolerance"), [(64, 0.04), (1000, 0.01)])
def test_lengths_have_the_published_means(name: str, count: int, tolerance: float) -> None:
    pairs = list(lengths(SHAPES[name], count, "7"))
    assert len(pairs) == count
    for side, published, longest in zip(zip(*pairs, strict=True), PUBLISHED[name], LONGEST[name], strict=True):
        assert mean(side) == pytest.approx(published, rel=tolerance)
        assert min(side) >= 4
        assert max(side) <= longest
        assert stdev(side) > 0.3 * mean(side)


def test_lengths_are_those_of_the_seed_and_go_on_without_end() -> None:
    shape = SHAPES["sharegpt"]
    assert list(lengths(shape, 50, "1")) == list(lengths(shape, 50, "1"))
    assert list(lengths(shape, 50, "1")) != list(lengths(shape, 50, "2"))
    assert mean(answer for _, answer in islice(lengths(shape, None, "1"), 1024)) == pytest.approx(337.99, rel=0.01)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = arrivals(4001, 8.0, burstiness, "3")
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert times[-1] == pytest.approx(500)
    # A gamma distribution with shape k has a coefficient of variation of 1 / sqrt(k).
    assert stdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrivals(3, math.inf, 1.0, "0") == [0.0, 0.0, 0.0]
    assert arrivals(1, 5.0, 1.0, "0") == [0.0]
