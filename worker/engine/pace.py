"""Learns the pace of an engine from its steps and from the requests that end: seconds of tokens and of requests.

Gateways estimate from it whether a deadline can be met, and `claim` whether it still can (docs/deadlines.md). The
numbers need no assumption about the model, the machine, drafts or the prefix cache:

    time between two tokens of a stream    mean over the steps with decodes, whatever else they compute
    time of a token of a prompt            what a step with chunks takes longer than one that only decodes
    time between two ends of requests      counted while the engine is full: the speed at which a queue gets shorter
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from quire.shared.protocol.pace import Pace
from quire.shared.protocol.share import INPUT_COST, OUTPUT_COST
from quire.worker.engine.sequence import GroupState, SequenceGroup
from quire.worker.engine.step import Step

# Weights of the newest step, and of the newest request, in the averages.
STEP_WEIGHT = 1 / 64
END_WEIGHT = 1 / 32
# Largest time of a step that counts, in average steps and in seconds: a stopped process learns little from its break.
LONGEST, LONGEST_S = 8.0, 1.0
# Steps for which an engine still counts as full: a row that becomes free is taken within a few steps.
FULL_STEPS = 16
# Requests that end before the time between two ends counts as known; at least as many as there are rows.
LEAST_ENDS = 8
# Seconds after which what a full engine has shown is forgotten.
FORGET_S = 60.0
# Answers whose median is the expected length.
ANSWERS = 64


class PaceMeter:
    """The pace of one engine. max_num_seqs: its rows. clock: returns seconds."""

    def __init__(self, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        # End of the last step, while there is work; and begin of the first step after that.
        self._since: float | None = None
        # Seconds of a step with decodes, of one without chunks, and between two tokens of a stream; 0 while unknown.
        self._step_s = self._base_s = self._token_s = 0.0
        # Sums whose ratio is the time of a prompt token.
        self._chunk_s = self._chunk_tokens = 0.0
        # Of ended requests: tokens of prompts, those of them that were computed, and charged tokens.
        self._prompt_tokens = self._computed_tokens = self._charge = 0.0
        self._answers: deque[int] = deque(maxlen=ANSWERS)
        self._answer = 0
        # While full: steps for which the engine still counts as full, time since the last end, and averages.
        self._full_steps = 0
        self._full_at = float("-inf")
        self._full_s = self._request_s = self._rows = 0.0
        self._ends = self._num_ends = 0

    def begin_step(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def note_end(self, group: SequenceGroup) -> None:
        """Learn from a request that ends, for whatever reason, or is dropped."""
        if group.state is GroupState.WAITING and group.num_cached_tokens < 0:
            return  # it has not begun
        self._ends += 1
        prompt, generated = len(group.prompt), group.num_generated
        self._prompt_tokens += END_WEIGHT * (prompt - self._prompt_tokens)
        self._computed_tokens += END_WEIGHT * (prompt - max(0, group.num_cached_tokens) - self._computed_tokens)
        charge = INPUT_COST * prompt + OUTPUT_COST * generated
        self._charge = _average(self._charge, charge, END_WEIGHT)
        if group.max_tokens and group.is_finished and group.beams is None and not group.sampling.ignore_eos:
            self._answers.append(generated // len(group.sequences))
            self._answer = int(median(self._answers))

    def end_step(self, step: Step, is_full: bool, num_running: int, is_busy: bool) -> None:
        """Learn from a step that computed something.

        is_full: the engine can take no further request. num_running: rows that are taken. is_busy: more steps follow
        at once.
        """
        now = self._clock()
        seconds = now - (now if self._since is None else self._since)
        self._since = now if is_busy else None
        if self._step_s:
            seconds = min(seconds, max(LONGEST_S, LONGEST * self._step_s))
        self._step_s = _average(self._step_s, seconds, STEP_WEIGHT)
        decoding, chunks = step.num_decoding, step.num_prefill_tokens if step.chunks else 0
        if decoding:
            self._token_s = _average(self._token_s, seconds * decoding / (decoding + step.num_accepted), STEP_WEIGHT)
        if decoding and not chunks:
            self._base_s = _average(self._base_s, seconds, STEP_WEIGHT)
        if chunks and (not decoding or self._base_s):
            extra_s = max(0.0, seconds - (self._base_s if decoding else 0.0))
            self._chunk_s += STEP_WEIGHT * (extra_s - self._chunk_s)
            self._chunk_tokens += STEP_WEIGHT * (chunks - self._chunk_tokens)
        self._learn_full(now, seconds, is_full, num_running)

    def _learn_full(self, now: float, seconds: float, is_full: bool, num_running: int) -> None:
        """Learn how often requests end while the engine is full."""
        ends, self._ends = self._ends, 0
        if now - self._full_at > FORGET_S:
            self._num_ends, self._request_s, self._rows = 0, 0.0, 0.0
        if is_full:
            self._full_steps = FULL_STEPS
            self._rows = _average(self._rows, num_running, STEP_WEIGHT)
        elif self._full_steps:
            self._full_steps -= 1
        if not self._full_steps:
            self._full_s = 0.0
            return
        self._full_at = now
        self._full_s += seconds
        if ends:
            self._num_ends += ends
            weight = max(ends / self._num_ends, 1 - (1 - END_WEIGHT) ** ends)
            self._request_s += weight * (self._full_s / ends - self._request_s)
            self._full_s = 0.0

    def read(self) -> Pace:
        """Return the pace now. Another thread may call it."""
        share = self._computed_tokens / self._prompt_tokens if self._prompt_tokens else 1.0
        prompt_s = share * self._chunk_s / self._chunk_tokens if self._chunk_tokens else 0.0
        is_known = self._clock() - self._full_at <= FORGET_S and self._num_ends >= max(LEAST_ENDS, self._rows)
        return Pace(
            prompt_us=_us(prompt_s),
            token_us=_us(self._token_s),
            request_us=_us(self._request_s) if is_known else 0,
            rows=max(1, round(self._rows)) if is_known and self._rows else self._max_num_seqs,
            answer=self._answer,
            charge=round(self._charge),
        )


def _average(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old) if old else new


def _us(seconds: float) -> int:
    return min(2**31, round(1e6 * seconds))
