"""What steps cost and how full they are, noted on the engine's thread; a few microseconds per step.

|- schedule -|- execute ------------------|- sample -|- commit ----------------|
  who runs     inputs and the model;        logits to  counts, ends, the items of
               on a device that works on    tokens, or each request
               its own: the launch          the wait for them
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.measures import COUNTS, STEP_S, Histogram
from worker.engine.step import Step

PHASES = ("schedule", "execute", "sample", "commit")
KINDS = ("decode", "prefill", "mixed")


class StepTimes:
    """Histograms over all steps that computed something. `clock` gives seconds."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.seconds = {kind: Histogram(STEP_S) for kind in KINDS}
        self.phases = {phase: Histogram(STEP_S) for phase in PHASES}
        self.sequences = Histogram(COUNTS)
        self.tokens = {phase: Histogram(COUNTS) for phase in ("prefill", "decode")}
        # Seconds of the step under way that went into drawing tokens.
        self._sampling_s = 0.0

    def begin(self) -> float:
        """A step begins; the time. What was drawn between steps does not count."""
        self._sampling_s = 0.0
        return self.clock()

    def sampled(self, since: float) -> None:
        """Tokens were drawn, or waited for, since then."""
        self._sampling_s += self.clock() - since

    def note(self, step: Step, began: float, to_schedule: float, scheduled: float, executed: float) -> None:
        """A step is over. Times of the clock: its beginning, when it began to schedule, and the ends of phases."""
        end = self.clock()
        sampling_s = self._sampling_s
        phases = self.phases
        phases["schedule"].observe(scheduled - to_schedule)
        phases["execute"].observe(executed - scheduled)
        phases["sample"].observe(sampling_s)
        phases["commit"].observe(max(0.0, end - executed + to_schedule - began - sampling_s))
        decodes = len(step.decodes)
        if step.chunks:
            self.tokens["prefill"].observe(step.num_prefill_tokens)
            self.sequences.observe(decodes + len(step.chunks))
        else:
            self.sequences.observe(decodes)
        if decodes:
            self.tokens["decode"].observe(decodes)
        self.seconds["decode" if not step.chunks else "mixed" if decodes else "prefill"].observe(end - began)

    def copy(self) -> StepTimes:
        """What was noted until now."""
        copied = StepTimes()
        copied.seconds = {name: one.copy() for name, one in self.seconds.items()}
        copied.phases = {name: one.copy() for name, one in self.phases.items()}
        copied.sequences = self.sequences.copy()
        copied.tokens = {name: one.copy() for name, one in self.tokens.items()}
        return copied
