"""What steps cost and how full they are, noted on the engine's thread.

    |- schedule -|- execute ------------------|- sample -|- commit ----------------|
      who runs     inputs and the model;        logits to  counts, ends, the items of
                   on a device that works on    tokens, or each request
                   its own: the launch          the wait for them

A step only leaves a row of numbers; every BATCH steps, and when somebody asks, the rows are sorted into histograms
together, which is ten times cheaper than one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from quire.shared.telemetry.prometheus import COUNTS, STEP_S, Histogram
from quire.worker.engine.step import Step

PHASES = ("schedule", "execute", "sample", "commit")
KINDS = ("decode", "prefill", "mixed")
BATCH = 256


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
        # Of each step that is in no histogram yet: five times, the drawing of tokens, decodes, prompt tokens, chunks.
        self._rows: list[tuple[float, ...]] = []

    def begin(self) -> float:
        """A step begins; the time. What was drawn between steps does not count."""
        self._sampling_s = 0.0
        return self.clock()

    def sampled(self, since: float) -> None:
        """Tokens were drawn, or waited for, since then."""
        self._sampling_s += self.clock() - since

    def note(self, step: Step, began: float, to_schedule: float, scheduled: float, executed: float) -> None:
        """A step is over. Times of the clock: its beginning, when it began to schedule, and the ends of phases."""
        chunks = len(step.chunks)
        prompt_tokens = step.num_prefill_tokens if chunks else 0
        times = (began, to_schedule, scheduled, executed, self.clock(), self._sampling_s)
        self._rows.append((*times, len(step.decodes), prompt_tokens, chunks))
        if len(self._rows) >= BATCH:
            self._sort()

    def read(self) -> StepTimes:
        """What was noted until now, in histograms of its own."""
        self._sort()
        copied = StepTimes()
        copied.seconds = {name: one.copy() for name, one in self.seconds.items()}
        copied.phases = {name: one.copy() for name, one in self.phases.items()}
        copied.sequences = self.sequences.copy()
        copied.tokens = {name: one.copy() for name, one in self.tokens.items()}
        return copied

    def _sort(self) -> None:
        if not self._rows:
            return
        columns = np.array(self._rows).T
        self._rows.clear()
        began, to_schedule, scheduled, executed, end, sampling_s, decodes, prompt_tokens, chunks = columns
        _observe(self.phases["schedule"], scheduled - to_schedule)
        _observe(self.phases["execute"], executed - scheduled)
        _observe(self.phases["sample"], sampling_s)
        # What is left: also what was found out before there was anything to schedule.
        rest = (end - executed) + (to_schedule - began) - sampling_s
        _observe(self.phases["commit"], np.maximum(0.0, rest))
        _observe(self.sequences, decodes + chunks)
        _observe(self.tokens["prefill"], prompt_tokens[prompt_tokens > 0])
        _observe(self.tokens["decode"], decodes[decodes > 0])
        all_s = end - began
        _observe(self.seconds["decode"], all_s[chunks == 0])
        _observe(self.seconds["prefill"], all_s[decodes == 0])
        _observe(self.seconds["mixed"], all_s[(chunks > 0) & (decodes > 0)])


def _observe(histogram: Histogram, values: np.ndarray) -> None:
    at = np.searchsorted(histogram.bounds, values)  # the first bound that is not below
    for bucket, count in enumerate(np.bincount(at, minlength=len(histogram.counts)).tolist()):
        histogram.counts[bucket] += count
    histogram.sum += float(values.sum())
