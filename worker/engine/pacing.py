"""How many prompt tokens a step may take beside running streams, so that the time between two of their tokens keeps to
a target. It is learned from the steps themselves: nothing about the model or the machine is assumed.

    time of a step  =  base  +  token_s * prompt tokens          base: what the decodes alone take

Both numbers are exponential averages, so that they follow longer contexts and fuller batches. Where the split between
them is off the sum is still right at the number of tokens that steps take, and that is the one that counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Weight of the newest step in the averages.
WEIGHT = 0.2
# How fast an estimate may be tried out: so many times the most prompt tokens that recent steps took.
GROWTH = 2.0
# How fast it is forgotten what recent steps took, per step.
FADING = 0.95


class PrefillPacer:
    """Learns from measured steps; `allowance` is the bound for the next one.

    target_s: seconds that a step with decodes may take. block_size: prompt tokens that a step may always take, so that
    prompts advance also where the target cannot be met. limit: prompt tokens that it may never exceed. clock: measures
    steps, in seconds.
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
        # Seconds of a step that only decodes; None until there was a step with decodes.
        self.base_s: float | None = None
        # Seconds of a prompt token, as the ratio of two averages: steps with few tokens say little about it.
        self._extra_s = 0.0
        self._extra_tokens = 0.0
        self._recent = float(self.least)

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token, 0 while nothing is known."""
        return self._extra_s / self._extra_tokens if self._extra_tokens else 0.0

    @property
    def allowance(self) -> int:
        """Prompt tokens that the next step may take if others decode in it."""
        tokens = GROWTH * self._recent
        if self.token_s > 0:
            tokens = min(tokens, (self.target_s - (self.base_s or 0.0)) / self.token_s)
        return max(self.least, min(self.limit, int(tokens)))

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a step: how many sequences decoded in it, how many prompt tokens it took, and its time."""
        if not num_decodes:
            # No stream waits for such a step. It is the first guess of what a token costs, and no more than that.
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
