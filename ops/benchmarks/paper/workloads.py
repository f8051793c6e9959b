"""Requests with the published statistics of the paper's traces (section 6.1), synthesised: no download, one seed.

The paper gives the mean lengths and, in figure 11, the shape: most requests are short, a long tail reaches the 2,048
tokens of the context. Lengths here have a lognormal distribution, because it has that shape. Lengths are clamped to at
least 4 tokens (vLLM's own benchmark filters shorter prompts) and to the context. One factor per trace is solved for, so
that the mean of the clamped lengths is the published mean to 1 %.

The spread (sigma of the logarithm, before clamping) is not published. The values here were chosen as follows:

- ShareGPT outputs 0.85: in section 6.2 30.42 requests fill 96 % of 15.7K slots, so a running request holds 497 tokens
  on average, of which 161 are the prompt; requests are met in proportion to their output length L, half done, so
  E[L^2] / 2 E[L] = 336 and the coefficient of variation of L is 1. A lognormal with sigma 0.85 has that.
- ShareGPT inputs 1.3: figure 11a shows a peak at a few tokens and a tail up to 1,024, wider than that of the outputs.
- Alpaca inputs 0.4 and outputs 0.85: instructions are one sentence; the outputs spread as those of ShareGPT do.

The baselines' batch sizes (figure 13) depend on the spread too and played no part in the choice for ShareGPT.

Arrivals are Poisson: independent exponential gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONTEXT = 2048
MIN_TOKENS = 4
MAX_PROMPT = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a trace: its lengths in tokens, and its arrival in seconds. The output has exactly this length."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Distribution of lengths: published means, chosen spreads."""

    name: str
    mean_prompt: float
    mean_output: float
    sigma_prompt: float
    sigma_output: float


SHAREGPT = LengthDistribution("ShareGPT", 161.31, 337.99, 1.3, 0.85)
ALPACA = LengthDistribution("Alpaca", 19.31, 58.45, 0.4, 0.85)
# One sentence and its translation (section 6.4). The paper publishes the lengths of the prefixes only; sentences of
# WMT16 English to German have about 25 words, or 30 tokens in English and 40 in German.
WMT = LengthDistribution("WMT16", 30.0, 40.0, 0.5, 0.5)
TRACES = {shape.name: shape for shape in (SHAREGPT, ALPACA)}


def lengths(shape: LengthDistribution, count: int, seed: int, context: int = CONTEXT) -> list[tuple[int, int]]:
    """Return prompt and output tokens of `count` requests, together at most `context`; means as published to 1 %.

    If `context` cuts off much of the tail, the factor raises the mean again, as far as it can.
    """
    # A smaller count gives the first requests of a larger one, except for the factor.
    prompt_shapes = np.exp(shape.sigma_prompt * np.random.default_rng([seed, 0]).standard_normal(count))
    output_shapes = np.exp(shape.sigma_output * np.random.default_rng([seed, 1]).standard_normal(count))
    longest = min(MAX_PROMPT, context // 2)
    prompts = _scaled(prompt_shapes, shape.mean_prompt, np.full(count, longest))
    outputs = _scaled(output_shapes, shape.mean_output, context - prompts)
    return [(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


def at_rate(pairs: list[tuple[int, int]], rate: float, seed: int) -> list[Request]:
    """Return requests of these lengths, in this order, that arrive at `rate` per second (Poisson)."""
    gaps = np.random.default_rng([seed, 2]).exponential(1.0, len(pairs)) / rate
    arrivals = np.cumsum(gaps) - gaps[0]
    return [Request(float(at), *pair) for at, pair in zip(arrivals, pairs, strict=True)]


def chatbot_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Return the lengths of conversations (section 6.5): all former rounds and the new message, cut to the last 1,024
    tokens; at most 1,024 tokens are generated.

    The number of former rounds is geometric with mean 5: ShareGPT's conversations have several rounds, and the paper
    says that most prompts are cut.
    """
    random = np.random.default_rng([seed, 3])
    rounds = random.geometric(1 / 6, count) - 1
    pairs = lengths(SHAREGPT, int(rounds.sum()) + count, seed)
    result, at = [], 0
    for former in rounds:
        history = sum(prompt + output for prompt, output in pairs[at : at + former])
        prompt, output = pairs[at + former]
        result.append((min(history + prompt, MAX_PROMPT), min(output, CONTEXT - MAX_PROMPT)))
        at += former + 1
    return result


def prefixed_lengths(prefix: int, count: int, seed: int) -> list[tuple[int, int]]:
    """Return the lengths of translation requests after a shared prefix of `prefix` tokens (section 6.4)."""
    return [(prefix + prompt, output) for prompt, output in lengths(WMT, count, seed)]


def _scaled(shapes: np.ndarray, mean: float, longest: np.ndarray) -> np.ndarray:
    """Return integers in proportion to `shapes`, int64 [count], from MIN_TOKENS to `longest`, with the given mean."""
    low, high = mean / 1000, mean * 1000
    for _ in range(60):
        factor = (low * high) ** 0.5
        values = np.clip(np.rint(shapes * factor), MIN_TOKENS, longest)
        low, high = (factor, high) if values.mean() < mean else (low, factor)
    lengths: np.ndarray = np.clip(np.rint(shapes * (low * high) ** 0.5), MIN_TOKENS, longest).astype(np.int64)
    return lengths
