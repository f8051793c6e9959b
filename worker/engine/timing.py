"""Times and sizes of steps, noted on the engine's thread.

    |- schedule -|- execute ------------------|- sample -|- commit ----------------|
      who runs     inputs and the model;        logits to  counts, ends, the items of
                   one step ahead: the          tokens, or each request
                   launch                       the wait for them

A step only appends one row of numbers. Every BATCH steps, and on each read, the rows go into histograms together, which
takes a tenth of the time of adding them one by one.
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
    """Histograms over all steps that computed something. `clock` returns seconds."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.seconds = {kind: Histogram(STEP_S) for kind in KINDS}
        self.phases = {phase: Histogram(STEP_S) for phase in PHASES}
        self.sequences = Histogram(COUNTS)
        self.tokens = {phase: Histogram(COUNTS) for phase in ("prefill", "decode")}
        # The current step: clock times, and seconds spent on sampling.
        self._began = self._schedule_began = self._schedule_ended = self._execute_ended = 0.0
        self._sampling_s = 0.0
        # Steps that are in no histogram yet: five clock times, seconds of sampling, decodes, drafted tokens
        # that they accepted, prompt tokens, chunks.
        self._rows: list[tuple[float, ...]] = []

    def begin_step(self) -> None:
        # Sampling between two steps, for a request that is cancelled, belongs to no step.
        self._sampling_s = 0.0
        self._began = self.clock()

    def begin_schedule(self) -> None:
        self._schedule_began = self.clock()

    def end_schedule(self) -> None:
        self._schedule_ended = self.clock()

    def end_execute(self) -> None:
        self._execute_ended = self.clock()

    def add_sampling(self, since: float) -> None:
        """Count the time since then as sampling."""
        self._sampling_s += self.clock() - since

    def end_step(self, step: Step) -> None:
        """Note a step that computed something."""
        chunks = len(step.chunks)
        prompt_tokens = step.num_prefill_tokens if chunks else 0
        self._rows.append(
            (
                self._began,
                self._schedule_began,
                self._schedule_ended,
                self._execute_ended,
                self.clock(),
                self._sampling_s,
                step.num_decoding,
                step.num_accepted,
                prompt_tokens,
                chunks,
            )
        )
        if len(self._rows) >= BATCH:
            self._sort()

    def read(self) -> StepTimes:
        """Return a copy of the histograms with all steps until now."""
        self._sort()
        copied = StepTimes()
        copied.seconds = {name: histogram.copy() for name, histogram in self.seconds.items()}
        copied.phases = {name: histogram.copy() for name, histogram in self.phases.items()}
        copied.sequences = self.sequences.copy()
        copied.tokens = {name: histogram.copy() for name, histogram in self.tokens.items()}
        return copied

    def _sort(self) -> None:
        if not self._rows:
            return
        columns = np.array(self._rows).T
        self._rows.clear()
        began, schedule_began, schedule_ended, execute_ended, end = columns[:5]
        sampling_s, decodes, accepted, prompt_tokens, chunks = columns[5:]
        _observe(self.phases["schedule"], schedule_ended - schedule_began)
        _observe(self.phases["execute"], execute_ended - schedule_ended)
        _observe(self.phases["sample"], sampling_s)
        # The rest of the step, which includes results that were collected before scheduling.
        rest = (end - execute_ended) + (schedule_began - began) - sampling_s
        _observe(self.phases["commit"], np.maximum(0.0, rest))
        _observe(self.sequences, decodes + chunks)
        _observe(self.tokens["prefill"], prompt_tokens[prompt_tokens > 0])
        _observe(self.tokens["decode"], (decodes + accepted)[decodes > 0])
        all_s = end - began
        _observe(self.seconds["decode"], all_s[chunks == 0])
        _observe(self.seconds["prefill"], all_s[decodes == 0])
        _observe(self.seconds["mixed"], all_s[(chunks > 0) & (decodes > 0)])


def _observe(histogram: Histogram, values: np.ndarray) -> None:
    at = np.searchsorted(histogram.bounds, values)  # the first bound that is not below the value
    for bucket, count in enumerate(np.bincount(at, minlength=len(histogram.counts)).tolist()):
        histogram.counts[bucket] += count
    histogram.sum += float(values.sum())
