"""Lengths of prompts and answers, and when requests arrive: published traces, synthesised from one seed.

Lengths of a trace are lognormal between a least and a most, and scaled so that their mean is the published mean:

- sharegpt, alpaca: means of the PagedAttention paper (section 6.1), spreads as in `ops/benchmarks/paper/workloads.py`.
- azure-chat, azure-code: the Azure LLM inference traces of 2023 (conversation: 19,366 requests, code: 8,819). Means and
  longest are theirs, spreads are those of the logarithms of their lengths.

Each block of requests takes the distribution at evenly spaced quantiles, in random order, so that a short run has the
same lengths as a long run: the mean of 64 requests is within a few percent of the published mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import NormalDist

BLOCK = 256
_STEPS = 1000


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens, `least` to `most`, with mean `mean`; `sigma` 0 is always the mean."""

    mean: float
    sigma: float = 0.0
    least: int = 1
    most: int = 1_000_000

    @cached_property
    def _scale(self) -> float:
        """Factor for the lognormal values that makes their mean after clamping equal to `mean`."""
        shapes = [math.exp(self.sigma * NormalDist().inv_cdf((i + 0.5) / _STEPS)) for i in range(_STEPS)]
        low, high = self.mean / 1000, self.mean * 1000
        for _ in range(50):
            middle = math.sqrt(low * high)
            mean = sum(min(max(shape * middle, self.least), self.most) for shape in shapes) / _STEPS
            low, high = (middle, high) if mean < self.mean else (low, middle)
        return math.sqrt(low * high)

    def at(self, quantile: float) -> int:
        """Return the length that the share `quantile` (0 to 1, both excluded) of all requests stays below."""
        if not self.sigma:
            return round(self.mean)
        value = self._scale * math.exp(self.sigma * NormalDist().inv_cdf(quantile))
        return round(min(max(value, self.least), self.most))


@dataclass(frozen=True)
class WorkloadShape:
    """A workload: lengths of prompts and answers, and how many of a prompt's first tokens all requests share."""

    name: str
    prompt: Lengths
    answer: Lengths
    shared_prefix: int = 0


SHAPES = {
    shape.name: shape
    for shape in (
        WorkloadShape("sharegpt", Lengths(161.31, 1.3, 4, 1024), Lengths(337.99, 0.85, 4, 2048)),
        WorkloadShape("alpaca", Lengths(19.31, 0.4, 4, 1024), Lengths(58.45, 0.85, 4, 2048)),
        WorkloadShape("azure-chat", Lengths(1155, 0.99, 4, 14_050), Lengths(211, 0.86, 4, 1000)),
        WorkloadShape("azure-code", Lengths(2048, 1.36, 4, 7437), Lengths(28, 0.85, 4, 1899)),
        WorkloadShape("prefix", Lengths(32), Lengths(64), shared_prefix=512),
        WorkloadShape("fixed", Lengths(128), Lengths(64)),
    )
}


def lengths(shape: WorkloadShape, count: int | None, seed: str) -> Iterator[tuple[int, int]]:
    """Yield the tokens of prompt (with the shared prefix) and answer; `count` pairs, or without end if None."""
    draw = random.Random(f"lengths {seed}")
    block = min(count or BLOCK, BLOCK)
    left = count
    while left is None or left > 0:
        size = block if left is None else min(block, left)
        sides = []
        for side in (shape.prompt, shape.answer):
            side_lengths = [side.at((i + draw.uniform(0.25, 0.75)) / size) for i in range(size)]
            draw.shuffle(side_lengths)
            sides.append(side_lengths)
        for prompt, answer in zip(*sides, strict=True):
            yield shape.shared_prefix + prompt, answer
        left = None if left is None else left - size


def arrivals(count: int, rate: float, burstiness: float, seed: str) -> list[float]:
    """Return the seconds at which `count` requests are sent: the first at 0, then `rate` per second.

    The gaps are gamma-distributed with shape `burstiness` (1 is Poisson, less is bursts, more is regular) and scaled so
    that the rate is exactly that asked for, also of a few. An infinite rate is all of them at once.
    """
    draw = random.Random(f"arrivals {seed}")
    times = list(accumulate((draw.gammavariate(burstiness, 1.0) for _ in range(count - 1)), initial=0.0))
    if not math.isfinite(rate) or not times[-1]:
        return [0.0] * count
    return [at / times[-1] * (count - 1) / rate for at in times]
