"""The number of prompt tokens that a step may take next to decodes, for a target time between two tokens of a stream.

The pacer learns this number from the times of steps, without assumptions about the model or the machine:

    time of a step  =  base_s  +  token_s * prompt tokens          base_s: a step that only decodes

Both numbers are exponential averages, so that they follow longer contexts and fuller batches. If the split between them
is inexact, their sum is still right at the number of tokens that recent steps took, and only the sum matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Weight of the newest step in the averages.
WEIGHT = 0.2
# The allowance is at most this many times the prompt tokens of the largest recent step.
GROWTH = 2.0
# Decay of the largest recent step, per step.
FADING = 0.95


class PrefillPacer:
    """Learns from measured steps; `allowance` is the bound for the next one.

    target_s: seconds that a step with decodes may take. block_size: prompt tokens that a step may always take, so that
    prompts advance even if the target cannot be met. limit: prompt tokens that a step never exceeds. clock: returns
    seconds.
    """

    def __init__(
        self, target_s: float, block_size: int, limit: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if target_s <= 0 or block_size < 1 or limit < 1:
            raise ValueError(f"target_s {target_s}, block_size {block_size} and limit {limit} must be above 0")
        self.target_s = target_s
        self.limit = limit
        self.clock = clock
        self.least = min(block_size, limit)
        # Seconds of a step that only decodes; None before the first step with decodes.
        self.base_s: float | None = None
        # Seconds of a prompt token are the ratio of two averages, so that steps with few tokens weigh little.
        self._extra_s = 0.0
        self._extra_tokens = 0.0
        self._recent = float(self.least)

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token; 0 while unknown."""
        return self._extra_s / self._extra_tokens if self._extra_tokens else 0.0

    @property
    def allowance(self) -> int:
        """Prompt tokens that the next step may take if it also decodes."""
        return self.allowance_beside(0.0)

    def allowance_beside(self, seconds: float) -> int:
        """Return the prompt tokens that the next step may take if it decodes, and other work takes these seconds."""
        tokens = GROWTH * self._recent
        if self.token_s > 0:
            tokens = min(tokens, (self.target_s - (self.base_s or 0.0) - seconds) / self.token_s)
        return max(self.least, min(self.limit, int(tokens)))

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a step: its number of decodes, its number of prompt tokens, and its time."""
        if not num_decodes:
            # No stream waits for a step without decodes. Such a step only gives a first estimate of token_s.
            if num_prefill_tokens and not self._extra_tokens:
                self._extra_s, self._extra_tokens = seconds, float(num_prefill_tokens)
            return
        if not num_prefill_tokens:
            self.base_s = seconds if self.base_s is None else _average(self.base_s, seconds)
            return
        if self.base_s is None:
            self.base_s = max(0.0, seconds - self.token_s * num_prefill_tokens)
        extra_s = max(0.0, seconds - self.base_s)
        if self._extra_tokens:
            self._extra_s = _average(self._extra_s, extra_s)
            self._extra_tokens = _average(self._extra_tokens, num_prefill_tokens)
        else:
            self._extra_s, self._extra_tokens = extra_s, float(num_prefill_tokens)
        self._recent = max(num_prefill_tokens, FADING * self._recent, self.least)


def _average(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
