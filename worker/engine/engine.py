"""The engine: requests in, tokens out, one step at a time. Knows nothing of Redis or HTTP, and is used by one thread.

`step()` schedules, executes, samples and commits. Its results are `StepItem`s: the new tokens of each request, in
order. Requests of which the best of several sequences are wanted (best_of, beam search) have one item, at their end.

On a device that works on its own (`DeviceRunner`) a step is launched before the tokens of the one before are known, and
these are its results. Until they are known they stand as PENDING in their sequences. A sequence that turns out to have
ended took part in one step too many; what that drew is dropped. While a request runs that needs its tokens before its
next step (beams, penalties, best_of) every step is waited for.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import repeat
from typing import Any

import numpy as np
import torch

from quire.shared.messages import Delta, GenerationRequest, Outcome, SamplingParams, StepItem
from quire.shared.text.detokenizer import TokenDecoder as TextDecoder
from quire.worker.device.device_runner import DeviceRunner
from quire.worker.device.runner import Runner
from quire.worker.device.staging import SampledTokens
from quire.worker.engine.beams import BeamSearch
from quire.worker.engine.blocks import BlockManager, cache_root
from quire.worker.engine.grammars import Grammars, Matcher
from quire.worker.engine.in_flight import InFlightStep
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.integrity import check_scheduler
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.engine.results import Results, best_beams
from quire.worker.engine.sampler import Sampler
from quire.worker.engine.sampling_inputs import SamplingInputs, book
from quire.worker.engine.scheduler import Scheduler
from quire.worker.engine.sequence import PENDING, Sequence, SequenceGroup
from quire.worker.engine.step import Step
from quire.worker.engine.timing import StepTimes

log = logging.getLogger(__name__)

NO_WAY_ON = "the answer cannot follow its JSON schema any more"
# The class of requests that do not say (`quire.shared.keys.DEFAULT_CLASS`).
STANDARD = 1


class Engine:
    """A continuous-batching engine over one model.

    tokenizer: turns ids into text for requests with stop strings; others are never detokenized here.
    grammars: of JSON schemas, for requests that ask for one; without them these are refused.
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
        runner: Callable[[Any, EngineLimits, InputBatch], Runner] = Runner,
        grammars: Grammars | None = None,
    ):
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size: int = model.vocab_size
        self.name = name
        self.scheduler = Scheduler(limits, blocks)
        self.rows = self.scheduler.rows
        self.runner = runner(model, limits, self.rows)
        self.sampler = Sampler(model.ops, eos_token_ids, self.rows)
        self.grammars = grammars or Grammars(None, self.vocab_size, eos_token_ids)
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
        self._results = Results(self.eos_token_ids, self.vocab_size, tokenizer, self._end, self._forget)
        self._arrivals = 0
        # The step whose tokens are not known yet; results that have not left; sequences that ended while a step with
        # them was under way; and requests that need their tokens before they can go on.
        self._flight: InFlightStep | None = None
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
        self._check_tokens(request.prompt, *outputs.values(), [token for token, _ in request.sampling.logit_bias])
        self.scheduler.check_fits(group)
        matchers = self._matchers(request.sampling, outputs)
        self._arrivals += 1
        group.start(outputs)
        if request.sampling.beam_width:
            eos = frozenset() if request.sampling.ignore_eos else self.eos_token_ids
            group.beams = BeamSearch(request.sampling, eos)
        for sequence in group.sequences:
            if sequence.choice in finished:
                sequence.finish_reason = finished[sequence.choice].finish_reason
            else:
                self._results.watch(sequence)
                sequence.matcher = matchers.get(sequence.choice)
        self.groups[request.id] = group
        sampling = request.sampling
        is_plain = group.is_streamed and not (group.has_penalties or sampling.min_tokens or sampling.logprobs)
        if not is_plain or sampling.logit_bias or matchers:
            self._bound.add(request.id)
        self.scheduler.add(group)

    def _matchers(self, sampling: SamplingParams, outputs: dict[int, list[int]]) -> dict[int, Matcher]:
        """Of each choice, behind what it has drawn; none without a grammar. Raises RequestRefused."""
        if not sampling.json_schema:
            return {}
        if sampling.beam_width:
            raise RequestRefused("a beam search does not follow a JSON schema")
        matchers = {choice: self.grammars.matcher(sampling.json_schema) for choice in range(sampling.num_sequences)}
        for choice, token_ids in outputs.items():
            matchers[choice].consume(token_ids)
            if error := matchers[choice].error:
                raise RequestRefused(f"{NO_WAY_ON}: {error}")
        return matchers

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
        is_ahead = self.runner.looks_ahead and not self._bound
        if not is_ahead:
            self._landed += self._land()
        to_schedule = times.clock()
        step = self.scheduler.schedule()
        scheduled = times.clock()
        if self.observer is not None:
            self.observer(step)
        if not step.num_tokens:
            self.runner.move_blocks(step)  # a group came back, and decodes from the next step on
            self._landed += self._land()
            return self._take_landed()
        if is_ahead:
            step, flight = self._launch(step)
            executed = times.clock()
            self._landed += self._land()
            self._flight = flight
        else:
            step, logits = self._execute(step)
            executed = times.clock()
            self._landed += self._commit(self._book(step, logits))
        times.note(step, began, to_schedule, scheduled, executed)
        if pacer is not None:
            pacer.observe(len(step.decodes), step.num_prefill_tokens, pacer.clock() - started)
        if self.checks_itself:
            self.check_integrity()
        return self._take_landed()

    def _take_landed(self) -> list[StepItem]:
        """The results that have not left. A step that fails leaves them where they are, for `fail`."""
        items, self._landed = self._landed, []
        return items

    def _execute(self, step: Step) -> tuple[Step, torch.Tensor]:
        """Compute a step, or a smaller one instead if device memory runs out; that one, and its logits."""
        while (logits := self.runner.execute(step)) is None:
            tokens = max(step.num_tokens // 2, self.limits.max_num_seqs)
            log.warning("out of device memory in a step of %d tokens: from now on %d at most", step.num_tokens, tokens)
            self.scheduler.max_num_batched_tokens = tokens
            step = self.scheduler.schedule()
        return step, logits

    def _launch(self, step: Step) -> tuple[Step, InFlightStep | None]:
        """Have the device compute a step, without waiting for it: what it is then, and None if nobody draws a token."""
        assert isinstance(self.runner, DeviceRunner)
        tokens = self.runner.decode(step)
        if tokens is not None:
            active = step.decodes
            self.num_steps += 1
            self.num_decode_tokens += len(active)
        else:
            step, logits = self._execute(step)
            active, logits = self._book(step, logits)
            if not active:
                return step, None
            tokens = self.runner.draw(logits, active.rows)
        flight = InFlightStep.launch(active, tokens, self.rows)
        self.rows.last_tokens[active.rows] = PENDING
        deque(map(list.append, active.token_ids, repeat(PENDING)), maxlen=0)
        for index in np.flatnonzero(flight.is_last).tolist():
            self._leave(active.sequences[index])
        return step, flight

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
            self._gone.clear()
            return []
        assert isinstance(flight.tokens, SampledTokens)
        waiting = self.times.clock()
        tokens = flight.tokens.wait()
        self.times.sampled(waiting)
        gone, self._gone = self._gone, set()
        if gone:
            flight, at = flight.without(gone)
            tokens = tokens[at]
        drawn = tokens.tolist()
        deque(map(list.__setitem__, flight.active.token_ids, flight.lengths.tolist(), drawn), maxlen=0)
        return self._results.of(flight, tokens, drawn)

    def _book(self, step: Step, logits: torch.Tensor) -> SamplingInputs:
        """Note what was computed, and collect who gets a token."""
        self.num_steps += 1
        self.num_decode_tokens += len(step.decodes)
        self.num_prefill_tokens += step.num_prefill_tokens
        return book(step, logits, self.scheduler)

    def _commit(self, sampled: SamplingInputs) -> list[StepItem]:
        """Draw, append, finish what ends here, and say what is new."""
        items: list[StepItem] = []
        is_beam = self.rows.is_beam[sampled.active.rows]
        if is_beam.any():
            searching, sampled = sampled.split(is_beam)
            for group, part in searching.by_group():
                if best := self._search(group, part):
                    items.append(self._results.item(group, best))
        return items + self._draw(sampled) if sampled.active else items

    def _draw(self, sampled: SamplingInputs) -> list[StepItem]:
        """One token for each sequence, and one item for each group that streams or ends."""
        active, logits = sampled
        began = self.times.clock()
        tokens = self.sampler.sample(logits, active.rows, active.sequences)
        self.times.sampled(began)
        flight = InFlightStep.launch(active, tokens, self.rows)
        self.rows.last_tokens[active.rows] = tokens
        drawn = tokens.tolist()
        # A loop without Python's: of what a step costs, this and the items grow with the sequences.
        deque(map(list.append, active.token_ids, drawn), maxlen=0)
        lost: dict[str, str] = {}
        for index in np.flatnonzero(self.rows.is_adjusted[active.rows]):
            sequence = active.sequences[index]
            if (counts := sequence.output_counts) is not None:
                counts[drawn[index]] += 1
            if (matcher := sequence.matcher) is not None:
                matcher.consume(drawn[index : index + 1])
                if matcher.error is not None:
                    lost[sequence.group.request_id] = matcher.error
        items = self._results.of(flight, tokens, drawn)
        return self._lose(items, lost) if lost else items

    def _lose(self, items: list[StepItem], lost: dict[str, str]) -> list[StepItem]:
        """End requests whose answers cannot follow their grammars any more, without the tokens of this step."""
        starts = {item.request_id: item.start for item in items}
        for request_id in lost.keys() & self.groups.keys():
            self._forget(self.groups[request_id])
        ends = {request_id: Outcome("error", f"{NO_WAY_ON}: {why}") for request_id, why in lost.items()}
        items = [item for item in items if item.request_id not in lost]
        return items + [StepItem(request_id, starts.get(request_id, 0), (), end) for request_id, end in ends.items()]

    def _end(self, sequence: Sequence, count: int) -> None:
        """Let go of a sequence that has ended with its output token number `count`."""
        if sequence.group.pin_as is not None:
            self.scheduler.blocks.pin(sequence.group.pin_as, sequence)
        if self.runner.looks_ahead:
            self._gone.add(sequence)
            del sequence.token_ids[sequence.num_prompt_tokens + count :]
        self.scheduler.finish(sequence)

    def _search(self, group: SequenceGroup, sampled: SamplingInputs) -> list[Delta]:
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
            return best_beams(search.ended[: group.sampling.n])
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
        self._results.forget(group.sequences)
        self.scheduler.remove(group)

    # --- seen from outside --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.groups or self._flight or self._landed)

    def room(self) -> int:
        """How many more sequences fit now: rows that nobody runs in or waits for, but none while blocks are short."""
        return self.scheduler.room()

    def displaceable(self, priority: int) -> int:
        """Rows that a request of this class may take from lower ones, less those that wait for them already."""
        return self.scheduler.displaceable(priority)

    def check_integrity(self) -> None:
        """Raise unless all bookkeeping agrees."""
        check_scheduler(self.scheduler)
        known = {id(group) for group in self.groups.values()}
        held = {id(group) for group in self.scheduler.all_groups()}
        leaving = {id(one.group) for one in self._flight.active.sequences} if self._flight else set()
        assert held <= known <= held | leaving, "scheduler and engine disagree on what is unfinished"
        live = {id(sequence) for group in self.groups.values() for sequence in group.unfinished}
        assert {id(sequence) for sequence in self._results.watched()} <= live, "a finished sequence is still watched"
