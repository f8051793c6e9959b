"""The engine: requests in, tokens out, one step at a time. Knows nothing of Redis or HTTP, and is used by one thread.

`step()` schedules, executes, samples and commits. Its results are `StepItem`s: the new tokens of each request, in
order. Requests of which the best of several sequences are wanted (best_of, beam search) have one item, at their end.

On a device that works on its own (`DeviceRunner`) a step is launched before the tokens of the one before are known, and
these are its results. Until they are known they stand as PENDING in their sequences. A sequence that turns out to have
ended took part in one step too many; what that drew is dropped. While a request runs that needs its tokens before its
next step (beams, penalties, best_of) every step is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from shared.detokenizer import Decoder as TextDecoder
from shared.detokenizer import IncrementalDetokenizer
from shared.messages import Delta, GenerationRequest, Outcome, SamplingParams, StepItem
from shared.stopping import StopStringFilter
from worker.engine.beams import BeamSearch
from worker.engine.blocks import BlockManager, cache_root
from worker.engine.device_runner import DeviceRunner, Tokens
from worker.engine.integrity import check_scheduler
from worker.engine.limits import EngineLimits, RequestRefused
from worker.engine.pacing import PrefillPacer
from worker.engine.rows import Rows
from worker.engine.runner import Runner
from worker.engine.sampler import Sampler
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import PENDING, Sequence, SequenceGroup
from worker.engine.step import Active, Step
from worker.engine.timing import StepTimes

_new = tuple.__new__
# The class of requests that do not say (`shared.keys.DEFAULT_CLASS`).
STANDARD = 1


class Completion(NamedTuple):
    """One finished choice, offline. `score` is what best_of or beam search ranked it by."""

    token_ids: tuple[int, ...]
    finish_reason: str
    score: float | None


class Sampled(NamedTuple):
    """The sequences whose next token a step gives, and their logits."""

    active: Active
    logits: torch.Tensor  # float32 [R, V]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: who draws a token in it, and what was known of them then. Arrays are [R]."""

    active: Active
    tokens: Tokens | np.ndarray
    lengths: np.ndarray  # tokens that each had
    prompt_lengths: np.ndarray
    # Whether this token is the last that was asked for; whether its text is looked at; whether an end token ends it.
    is_last: np.ndarray
    is_watched: np.ndarray
    heeds_eos: np.ndarray

    def without(self, gone: set[Sequence]) -> tuple[Flight, np.ndarray]:
        """What is left of it without some sequences, and where that was."""
        at = np.array([i for i, one in enumerate(self.active.sequences) if one not in gone], dtype=np.int64)
        arrays = (self.lengths, self.prompt_lengths, self.is_last, self.is_watched, self.heeds_eos)
        kept = Active.of([self.active.sequences[i] for i in at])
        return Flight(kept, self.tokens, *(array[at] for array in arrays)), at


class _Deltas(dict[int, tuple[Delta]]):
    """What a step adds to a request with one sequence: a token. Made once for each token, and not in every step."""

    def __missing__(self, token: int) -> tuple[Delta]:
        if len(self) >= 1 << 16:
            self.clear()
        made = self[token] = (Delta(0, (token,), None, None, None),)
        return made


class Engine:
    """A continuous-batching engine over one model.

    tokenizer: turns ids into text for requests with stop strings; others are never detokenized here.
    name: of the model, for the hashes of cached prefixes.
    blocks: another allocator than the paged one, for comparison.
    runner: makes the runner; a DeviceRunner where the host should be a step ahead.
    """

    def __init__(
        self,
        model: Any,
        limits: EngineLimits,
        eos_token_ids: tuple[int, ...],
        tokenizer: TextDecoder | None,
        name: str = "",
        blocks: BlockManager | None = None,
        runner: Callable[[Any, EngineLimits, Rows], Runner] = Runner,
    ):
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size: int = model.vocab_size
        self.tokenizer = tokenizer
        self.name = name
        self.scheduler = Scheduler(limits, blocks)
        self.rows = self.scheduler.rows
        self.runner = runner(model, limits, self.rows)
        self.sampler = Sampler(model.ops, eos_token_ids, self.rows)
        self.groups: dict[str, SequenceGroup] = {}
        self.num_steps = 0
        # Tokens computed, prompts and decodes apart; what preemption lost counts again, as prompt.
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        # Bounds the prompt tokens of a step by its time; None leaves that to the limits.
        self.pacer: PrefillPacer | None = None
        self.times = StepTimes()
        # Sees each step that is scheduled, while somebody looks at the engine; must be quick, and change nothing.
        self.observer: Callable[[Step], None] | None = None
        # Run check_integrity after every step (tests).
        self.checks_itself = False
        self._is_eos = np.zeros(self.vocab_size, dtype=np.bool_)
        self._is_eos[[token for token in eos_token_ids if token < self.vocab_size]] = True
        self._arrivals = 0
        self._stops: dict[Sequence, StopWatch] = {}
        self._deltas = _Deltas()
        # The step whose tokens are not known yet; results that were found outside of a step; sequences that ended while
        # a step with them was under way; and requests that need their tokens before they can go on.
        self._flight: Flight | None = None
        self._landed: list[StepItem] = []
        self._gone: set[Sequence] = set()
        self._bound: set[str] = set()

    # --- requests in --------------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest, earlier: tuple[StepItem, ...] = (), priority: int = STANDARD) -> None:
        """Take a request; `earlier` is what other attempts at it emitted, and it goes on behind that.

        priority: 0 is the highest class. Raises RequestRefused, and changes nothing, for what could never run here.
        """
        root = cache_root(self.name, salt=request.cache_salt)
        group = SequenceGroup(request.id, request.prompt, request.sampling, self._arrivals, priority, root)
        outputs: dict[int, list[int]] = {}
        finished: dict[int, Delta] = {}
        for delta in (delta for item in earlier for delta in item.deltas):
            outputs.setdefault(delta.choice, []).extend(delta.token_ids)
            if delta.finish_reason:
                finished[delta.choice] = delta
        self._check_tokens(request.prompt, *outputs.values())
        self.scheduler.check_fits(group)
        self._arrivals += 1
        group.start(outputs)
        if request.sampling.beam_width:
            eos = frozenset() if request.sampling.ignore_eos else self.eos_token_ids
            group.beams = BeamSearch(request.sampling, eos)
        for sequence in group.sequences:
            if sequence.choice in finished:
                sequence.finish_reason = finished[sequence.choice].finish_reason
            elif request.sampling.stop and self.tokenizer is not None:
                watch = self._stops[sequence] = StopWatch(self.tokenizer, request.sampling.stop)
                watch.push(sequence.token_ids[sequence.num_prompt_tokens :])
        self.groups[request.id] = group
        if not group.is_streamed or group.has_penalties or request.sampling.min_tokens:
            self._bound.add(request.id)
        self.scheduler.add(group)

    def _check_tokens(self, prompt: SequenceOf[int], *outputs: SequenceOf[int]) -> None:
        """Refuse what would fail a step, and with it every request of that step."""
        if not prompt:
            raise RequestRefused("the prompt has no tokens")
        for token_ids in (prompt, *outputs):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
                raise RequestRefused(f"token id {max(token_ids)} is outside the vocabulary of {self.vocab_size}")

    def finish(self, request_id: str, outcome: str, detail: str = "") -> StepItem | None:
        """End a request from outside (cancelled, deadline, error): free all it holds, return its last item.

        None if it has ended by itself, also if the step under way says so; the results of the next `step` have that.
        """
        self._landed += self._land()
        group = self.groups.get(request_id)
        if group is None:
            return None
        self._forget(group)
        end = Outcome(outcome, detail)
        for index, item in enumerate(self._landed):
            if item.request_id == request_id:
                return self._landed.pop(index)._replace(outcome=end)
        return StepItem(request_id, group.num_emitted, (), end)

    def fail(self, detail: str) -> list[StepItem]:
        """End all requests after a step that failed, whatever is under way."""
        self._flight, landed, self._landed = None, self._landed, []
        ended = (self.finish(request_id, "error", detail) for request_id in list(self.groups))
        return landed + [item for item in ended if item]

    def drop(self, request_id: str) -> None:
        """Forget a request that another worker has taken over."""
        self._landed += self._land()
        self._landed = [item for item in self._landed if item.request_id != request_id]
        if group := self.groups.get(request_id):
            self._forget(group)

    def pin(self, name: str, token_ids: tuple[int, ...], cache_salt: str = "") -> None:
        """Compute a prefix now and keep it in the cache for ever (paper section 4.4). The engine is otherwise idle.

        Raises RequestRefused, naming the prefix, if it can never fit.
        """
        request = GenerationRequest(f"pin-{name}", self.name, token_ids, SamplingParams(1, temperature=0), cache_salt)
        try:
            self.add(request)
        except RequestRefused as error:
            raise RequestRefused(f"pinned prefix {name!r}: {error}") from None
        group = self.groups[request.id]
        group.pin_as = name
        self._bound.add(request.id)
        while request.id in self.groups:
            self.step()

    def prepare(self) -> bool:
        """Do, while nothing runs, one thing that makes later steps faster; False if there is nothing left to do."""
        return self.runner.capture_next()

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[StepItem]:
        """Run one iteration: at most one new token for each running sequence."""
        pacer, times = self.pacer, self.times
        began = times.begin()
        if pacer is not None:
            started = pacer.clock()
            self.scheduler.max_prefill_tokens = pacer.allowance
        items, self._landed = self._landed, []
        is_ahead = self.runner.looks_ahead and not self._bound
        if not is_ahead:
            items += self._land()
        to_schedule = times.clock()
        step = self.scheduler.schedule()
        scheduled = times.clock()
        if self.observer is not None:
            self.observer(step)
        if not step.num_tokens:
            self.runner.move_blocks(step)  # a group came back, and decodes from the next step on
            return items + self._land()
        if is_ahead:
            flight = self._launch(step)
            executed = times.clock()
            items += self._land()
            self._flight = flight
        else:
            logits = self.runner.execute(step)
            executed = times.clock()
            items += self._commit(self._book(step, logits))
        times.note(step, began, to_schedule, scheduled, executed)
        if pacer is not None:
            pacer.observe(len(step.decodes), step.num_prefill_tokens, pacer.clock() - started)
        if self.checks_itself:
            self.check_integrity()
        return items

    def _launch(self, step: Step) -> Flight | None:
        """Have the device compute a step, without waiting for it. None if nobody draws a token."""
        assert isinstance(self.runner, DeviceRunner)
        tokens = self.runner.decode(step)
        if tokens is not None:
            active = step.decodes
            self.num_steps += 1
            self.num_decode_tokens += len(active)
        else:
            active, logits = self._book(step, self.runner.execute(step))
            if not active:
                return None
            tokens = self.runner.draw(logits, active.rows)
        flight = self._take_off(active, tokens)
        self.rows.last_tokens[active.rows] = PENDING
        deque(map(list.append, active.token_ids, repeat(PENDING)), maxlen=0)
        for index in np.flatnonzero(flight.is_last).tolist():
            self._leave(active.sequences[index])
        return flight

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence that draws its last token out of the next step. Its blocks are free for later ones."""
        group = sequence.group
        self.scheduler.finish(sequence)
        if all(one.row < 0 for one in group.sequences):
            self.scheduler.remove(group)

    def _land(self) -> list[StepItem]:
        """Wait for the step under way, if there is one; its results."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        assert isinstance(flight.tokens, Tokens)
        waiting = self.times.clock()
        tokens = flight.tokens.wait()
        self.times.sampled(waiting)
        gone, self._gone = self._gone, set()
        if gone:
            flight, at = flight.without(gone)
            tokens = tokens[at]
        drawn = tokens.tolist()
        deque(map(list.__setitem__, flight.active.token_ids, flight.lengths.tolist(), drawn), maxlen=0)
        items: list[StepItem] = []
        self._finish_draw(flight, tokens, drawn, items)
        return items

    def _book(self, step: Step, logits: torch.Tensor) -> Sampled:
        """Note what was computed, let groups fork whose prompt is complete, and collect who gets a token."""
        self.num_steps += 1
        self.num_decode_tokens += len(step.decodes)
        self.num_prefill_tokens += step.num_prefill_tokens
        if not step.chunks:
            return Sampled(step.decodes, logits)
        sequences = [*step.decodes.sequences]
        sources = list(range(len(sequences)))
        at = len(sequences)
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            sequence.num_stored = max(sequence.num_stored, sequence.num_computed)
            if not sequence.group.beams or not sequence.num_output_tokens:
                self.scheduler.blocks.seal(sequence, sequence.num_computed)
            group = sequence.group
            ready = []
            if chunk.is_sampled:
                ready = self._ready(sequence)
                for one in ready:
                    self.scheduler.begin_decoding(one)
                    sequences.append(one)
                    sources.append(at)
                at += 1
            if (
                group.beams
                and not ready
                and all(len(beam.token_ids) - beam.num_computed == 1 for beam in group.sequences)
            ):
                for beam in group.sequences:
                    self.scheduler.begin_decoding(beam)
        if sources != list(range(at)):
            logits = logits[sources]
        return Sampled(Active.of(sequences), logits)

    def _ready(self, sequence: Sequence) -> list[Sequence]:
        """Who draws from the logits of a sequence whose chunks are all computed."""
        group = sequence.group
        if not group.needs_fork:
            return [sequence]
        self.scheduler.fork(group)
        # Those that an earlier attempt, or preemption, left with outputs compute these first.
        return [one for one in group.unfinished if not one.num_output_tokens]

    def _commit(self, sampled: Sampled) -> list[StepItem]:
        """Draw, append, finish what ends here, and say what is new."""
        items: list[StepItem] = []
        is_beam = self.rows.is_beam[sampled.active.rows]
        if is_beam.any():
            searching, sampled = _split(sampled, is_beam)
            for group, part in _by_group(searching):
                if best := self._search(group, part):
                    items.append(self._item(group, best))
        if sampled.active:
            self._draw(sampled, items)
        return items

    def _draw(self, sampled: Sampled, items: list[StepItem]) -> None:
        """One token for each sequence, and one item for each group that streams or ends."""
        active, logits = sampled
        began = self.times.clock()
        tokens = self.sampler.sample(logits, active.rows, active.sequences)
        self.times.sampled(began)
        flight = self._take_off(active, tokens)
        self.rows.last_tokens[active.rows] = tokens
        drawn = tokens.tolist()
        # A loop without Python's: of what a step costs, this and the items grow with the sequences.
        deque(map(list.append, active.token_ids, drawn), maxlen=0)
        for index in np.flatnonzero(self.rows.is_adjusted[active.rows]):
            if (counts := active.sequences[index].output_counts) is not None:
                counts[drawn[index]] += 1
        self._finish_draw(flight, tokens, drawn, items)

    def _take_off(self, active: Active, tokens: Tokens | np.ndarray) -> Flight:
        """Note that these sequences have one token more, whatever it is."""
        rows, at = self.rows, active.rows
        lengths = rows.lengths[at]
        rows.lengths[at] = lengths + 1
        is_last = lengths + 1 >= rows.max_lengths[at]
        return Flight(
            active, tokens, lengths, rows.prompt_lengths[at], is_last, rows.is_watched[at], ~rows.ignores_eos[at]
        )

    def _finish_draw(self, flight: Flight, tokens: np.ndarray, drawn: list[int], items: list[StepItem]) -> None:
        """The tokens are known: finish what ends here, and say what is new."""
        active, sequences = flight.active, flight.active.sequences
        ending = np.flatnonzero((self._is_eos[tokens] & flight.heeds_eos) | flight.is_watched | flight.is_last)
        outputs = flight.lengths - flight.prompt_lengths
        over = [i for i in ending.tolist() if self._is_over(sequences[i], drawn[i], int(outputs[i]) + 1)]
        if active.are_single:
            deltas = map(self._deltas.__getitem__, drawn)
            fields = zip(active.request_ids, outputs.tolist(), deltas, repeat(None))
            plain: list[StepItem] = list(map(_new, repeat(StepItem), fields))
            for index in over:
                plain[index] = self._item(sequences[index].group, [_delta(sequences[index], drawn[index])])
            items += plain
            return
        new: dict[SequenceGroup, list[Delta]] = {}
        for sequence, token in zip(sequences, drawn, strict=True):
            if sequence.group.is_streamed:
                new.setdefault(sequence.group, []).append(_delta(sequence, token))
        for group in dict.fromkeys(sequences[index].group for index in over):
            if not group.is_streamed and group.is_finished:
                new[group] = _best(group)
        for group, made in new.items():
            items.append(self._item(group, made))

    def _item(self, group: SequenceGroup, deltas: list[Delta]) -> StepItem:
        """What is new of a group; the last of it if the group has ended."""
        outcome = _outcome(group, deltas) if group.is_finished else None
        start = group.num_emitted - len(deltas) if group.is_streamed else 0
        if outcome is not None:
            self._forget(group)
        return StepItem(group.request_id, start, tuple(deltas), outcome)

    def _is_over(self, sequence: Sequence, token: int, count: int) -> bool:
        """Whether a sequence ends with its output token number `count`, which it has drawn. Then it is let go of."""
        params = sequence.group.sampling
        watch = self._stops.get(sequence)
        if token in self.eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif watch is not None and (matched := watch.push([token])) is not None:
            sequence.finish_reason, sequence.matched_stop = "stop", matched
        elif count >= params.max_tokens:
            sequence.finish_reason = "length"
        else:
            return False
        if sequence.group.pin_as is not None:
            self.scheduler.blocks.pin(sequence.group.pin_as, sequence)
        if self.runner.looks_ahead:
            self._gone.add(sequence)
            del sequence.token_ids[sequence.num_prompt_tokens + count :]
        self.scheduler.finish(sequence)
        self._stops.pop(sequence, None)
        return True

    def _search(self, group: SequenceGroup, sampled: Sampled) -> list[Delta]:
        """One step of a beam search; its results, if it ends here."""
        search, beams = group.beams, sampled.active.sequences
        assert search is not None
        if len(beams) < len(group.unfinished):
            raise AssertionError("the beams of a group are not in step")
        count = min(search.num_candidates, self.vocab_size)
        began = self.times.clock()
        logprobs, token_ids = self.sampler.top_logprobs(sampled.logits, sampled.active.rows, beams, count)
        self.times.sampled(began)
        going_on = search.advance(logprobs, token_ids, [beam.output for beam in beams])
        if going_on is None:
            for beam in beams:
                beam.finish_reason = "length"
            return [
                Delta(choice, best.token_ids, best.finish_reason, None, best.score)
                for choice, best in enumerate(search.ended[: group.sampling.n])
            ]
        self.scheduler.branch(group, [one.parent for one in going_on])
        for beam, one in zip(group.sequences, going_on, strict=True):
            beam.token_ids.append(one.token_id)
            if beam.output_counts is not None:
                beam.output_counts[one.token_id] += 1
            self.rows.lengths[beam.row] += 1
            self.rows.last_tokens[beam.row] = one.token_id
        return []

    def _forget(self, group: SequenceGroup) -> None:
        del self.groups[group.request_id]
        self._bound.discard(group.request_id)
        for sequence in group.sequences:
            self._stops.pop(sequence, None)
        self.scheduler.remove(group)

    # --- seen from outside --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.groups or self._flight or self._landed)

    def room(self) -> int:
        """How many more sequences fit now: rows that nobody runs in or waits for, but none while blocks are short."""
        scheduler = self.scheduler
        blocks = scheduler.blocks
        promised = sum(blocks.blocks_for(len(group.unfinished[0].token_ids)) for group in scheduler.all_waiting())
        promised += sum(blocks.blocks_to_swap_in(group.unfinished) for group in scheduler.swapped)
        if (blocks.num_free - promised) * 20 < self.limits.num_blocks:
            return 0
        return max(0, scheduler.rows.num_free - scheduler.num_waiting)

    def displaceable(self, priority: int) -> int:
        """Rows that a request of this class may take from lower ones, less those that wait for them already."""
        scheduler = self.scheduler
        lower = sum(group.num_rows for group in scheduler.running if group.priority > priority)
        waiting = sum(group.num_rows for group in scheduler.all_waiting() if group.priority <= priority)
        return max(0, lower - waiting)

    def check_integrity(self) -> None:
        """Raise unless all bookkeeping agrees."""
        check_scheduler(self.scheduler)
        known = {id(group) for group in self.groups.values()}
        held = {id(group) for group in self.scheduler.all_groups()}
        leaving = {id(one.group) for one in self._flight.active.sequences} if self._flight else set()
        assert held <= known <= held | leaving, "scheduler and engine disagree on what is unfinished"
        live = {id(sequence) for group in self.groups.values() for sequence in group.unfinished}
        assert {id(sequence) for sequence in self._stops} <= live, "a finished sequence is still watched"

    def generate(
        self, prompts: SequenceOf[tuple[int, ...]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[list[list[int]]]:
        """Offline: run prompts together to their end. Returns the output ids, [prompt][choice][token]."""
        return [[list(one.token_ids) for one in choices] for choices in self.complete(prompts, sampling)]

    def complete(
        self, prompts: SequenceOf[tuple[int, ...]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[list[Completion]]:
        """Offline: run prompts together to their end. Returns the choices of each, best first if ranked."""
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        deltas: dict[str, list[list[Delta]]] = {}
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            self.add(GenerationRequest(str(i), "offline", tuple(prompt), one))
            deltas[str(i)] = [[] for _ in range(one.n)]
        while self.has_work:
            for item in self.step():
                for delta in item.deltas:
                    deltas[item.request_id][delta.choice].append(delta)
        return [[_join(choice) for choice in deltas[str(i)]] for i in range(len(prompts))]


def _split(sampled: Sampled, mask: np.ndarray) -> tuple[Sampled, Sampled]:
    """Those of the mask, and the others."""
    parts = []
    for wanted in (mask, ~mask):
        at = np.flatnonzero(wanted)
        logits = sampled.logits if len(at) == len(mask) else sampled.logits[torch.from_numpy(at)]
        parts.append(Sampled(Active.of([sampled.active.sequences[i] for i in at]), logits))
    return parts[0], parts[1]


def _by_group(sampled: Sampled) -> list[tuple[SequenceGroup, Sampled]]:
    """The part of each group. A group's sequences lie next to each other."""
    sequences = sampled.active.sequences
    groups = [sequence.group for sequence in sequences]
    starts = [i for i, group in enumerate(groups) if i == 0 or group is not groups[i - 1]]
    return [
        (groups[start], Sampled(Active.of(sequences[start:end]), sampled.logits[start:end]))
        for start, end in zip(starts, [*starts[1:], len(groups)], strict=True)
    ]


def _delta(sequence: Sequence, token: int) -> Delta:
    """The token that a sequence has just drawn."""
    return Delta(sequence.choice, (token,), sequence.finish_reason, sequence.matched_stop)


def _outcome(group: SequenceGroup, last: list[Delta]) -> Outcome:
    """How a finished group ended: for want of tokens if one of its choices did."""
    choices = group.sequences if group.is_streamed else last
    return Outcome("length" if "length" in {choice.finish_reason for choice in choices} else "stop")


def _best(group: SequenceGroup) -> list[Delta]:
    """The n choices with the highest mean log-probability (OpenAI API reference, `best_of`)."""
    ranked = sorted(group.sequences, key=lambda sequence: -sequence.logprob / sequence.num_output_tokens)
    return [
        Delta(choice, one.output, one.finish_reason, one.matched_stop, one.logprob / one.num_output_tokens)
        for choice, one in enumerate(ranked[: group.sampling.n])
    ]


def _join(deltas: list[Delta]) -> Completion:
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    return Completion(token_ids, deltas[-1].finish_reason or "", deltas[-1].score)


class StopWatch:
    """Looks for the stop strings of one sequence in its text, as the gateway will."""

    def __init__(self, tokenizer: TextDecoder, stop: tuple[str, ...]) -> None:
        self._text = IncrementalDetokenizer(tokenizer)
        self._filter = StopStringFilter(stop)

    def push(self, token_ids: list[int]) -> str | None:
        """Take tokens; the stop string that their text completes, if any."""
        self._filter.push(self._text.push(token_ids))
        return self._filter.matched
