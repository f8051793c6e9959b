"""The engine: requests in, tokens out, one step at a time. Knows nothing of Redis or HTTP, and is used by one thread.

`step()` schedules, executes, samples and commits. Its results are `StepItem`s: the new tokens of each request, in
order.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from shared.detokenizer import Decoder as TextDecoder
from shared.detokenizer import IncrementalDetokenizer
from shared.messages import Delta, GenerationRequest, Outcome, SamplingParams, StepItem
from shared.stopping import StopStringFilter
from worker.engine.runner import Runner
from worker.engine.sampler import Sampler
from worker.engine.scheduler import EngineLimits, RequestRefused, ScheduledSequence, Scheduler
from worker.engine.sequence import Sequence, SequenceGroup


class Engine:
    """A continuous-batching engine over one model.

    tokenizer: turns ids into text for requests with stop strings; others are never detokenized here.
    """

    def __init__(self, model: Any, limits: EngineLimits, eos_token_ids: tuple[int, ...], tokenizer: TextDecoder | None):
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size: int = model.vocab_size
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(limits)
        self.runner = Runner(model, limits)
        self.sampler = Sampler(model.ops, eos_token_ids)
        self.groups: dict[str, SequenceGroup] = {}
        self.num_steps = 0
        self._arrivals = 0
        self._stops: dict[Sequence, StopWatch] = {}

    def add(self, request: GenerationRequest, earlier: tuple[StepItem, ...] = ()) -> None:
        """Take a request; `earlier` is what other attempts at it emitted, and it goes on behind that.

        Raises RequestRefused, and changes nothing, for what could never run here.
        """
        group = SequenceGroup(request.id, request.prompt, request.sampling, self._arrivals)
        self.scheduler.check_fits(group)
        self._arrivals += 1
        outputs: dict[int, list[int]] = {}
        finished: dict[int, Delta] = {}
        for delta in (delta for item in earlier for delta in item.deltas):
            outputs.setdefault(delta.choice, []).extend(delta.token_ids)
            if delta.finish_reason:
                finished[delta.choice] = delta
        self._check_tokens(request.prompt, *outputs.values())
        group.start(outputs)
        for sequence in group.sequences:
            if sequence.choice in finished:
                sequence.finish_reason = finished[sequence.choice].finish_reason
            elif request.sampling.stop and self.tokenizer is not None:
                watch = self._stops[sequence] = StopWatch(self.tokenizer, request.sampling.stop)
                watch.push(sequence.token_ids[sequence.num_prompt_tokens :])
        self.groups[request.id] = group
        self.scheduler.add(group)

    def _check_tokens(self, prompt: SequenceOf[int], *outputs: SequenceOf[int]) -> None:
        """Refuse what would fail a step, and with it every request of that step."""
        if not prompt:
            raise RequestRefused("the prompt has no tokens")
        for token_ids in (prompt, *outputs):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
                raise RequestRefused(f"token id {max(token_ids)} is outside the vocabulary of {self.vocab_size}")

    def finish(self, request_id: str, outcome: str, detail: str = "") -> StepItem | None:
        """End a request from outside (cancelled, deadline, error): free all it holds, return its last item."""
        group = self.groups.get(request_id)
        if group is None:
            return None
        self._forget(group)
        return StepItem(request_id, group.num_emitted, (), Outcome(outcome, detail))

    def drop(self, request_id: str) -> None:
        """Forget a request that another worker has taken over."""
        if group := self.groups.get(request_id):
            self._forget(group)

    def step(self) -> list[StepItem]:
        """Run one iteration: at most one new token for each running sequence."""
        step = self.scheduler.schedule()
        if not step:
            return []
        logits = self.runner.execute(step)
        sampled = [entry.sequence for entry in step if entry.is_sampled]
        tokens = self.sampler.sample(logits, sampled) if sampled else []
        return self._commit(step, sampled, tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.groups)

    def room(self) -> int:
        """How many more sequences fit now: rows that nobody runs in or waits for, but none while blocks are short."""
        scheduler = self.scheduler
        promised = sum(map(scheduler.blocks.missing, scheduler.waiting))
        if (scheduler.blocks.num_free - promised) * 20 < self.limits.num_blocks:
            return 0
        return max(0, self.limits.max_num_seqs - scheduler.num_unfinished)

    def check_integrity(self) -> None:
        """Raise unless all bookkeeping agrees (tests run it after every step)."""
        self.scheduler.check_integrity()
        known = {id(sequence) for group in self.groups.values() for sequence in group.unfinished}
        held = {id(sequence) for sequence in (*self.scheduler.running, *self.scheduler.waiting)}
        assert known == held, "scheduler and groups disagree on what is unfinished"
        assert {id(sequence) for sequence in self._stops} <= known, "a finished sequence is still watched"

    def _commit(self, step: list[ScheduledSequence], sampled: list[Sequence], tokens: list[int]) -> list[StepItem]:
        """Book what was computed and drawn; finish what ends here."""
        self.num_steps += 1
        for entry in step:
            entry.sequence.num_computed += entry.num_tokens
        deltas: dict[SequenceGroup, list[Delta]] = {}
        for sequence, token in zip(sampled, tokens, strict=True):
            sequence.append(token)
            self._check_finished(sequence, token)
            delta = Delta(sequence.choice, (token,), sequence.finish_reason, sequence.matched_stop)
            deltas.setdefault(sequence.group, []).append(delta)
        items = []
        for group, changes in deltas.items():
            changes.sort(key=lambda delta: delta.choice)
            outcome = self._outcome(group) if group.is_finished else None
            items.append(StepItem(group.request_id, group.num_emitted, tuple(changes), outcome))
            group.num_emitted += len(changes)
            if outcome:
                self._forget(group)
        return items

    def _check_finished(self, sequence: Sequence, token: int) -> None:
        params = sequence.group.sampling
        watch = self._stops.get(sequence)
        if token in self.eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif watch is not None and (matched := watch.push([token])) is not None:
            sequence.finish_reason, sequence.matched_stop = "stop", matched
        elif sequence.num_output_tokens >= params.max_tokens:
            sequence.finish_reason = "length"
        if sequence.is_finished:
            self.scheduler.finish(sequence)
            self._stops.pop(sequence, None)

    @staticmethod
    def _outcome(group: SequenceGroup) -> Outcome:
        reasons = {sequence.finish_reason for sequence in group.sequences}
        return Outcome("length" if "length" in reasons else "stop")

    def _forget(self, group: SequenceGroup) -> None:
        del self.groups[group.request_id]
        for sequence in group.sequences:
            self.scheduler.finish(sequence)
            self._stops.pop(sequence, None)

    def generate(
        self, prompts: list[tuple[int, ...]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[list[list[int]]]:
        """Offline: run prompts together to their end. Returns the output ids, [prompt][choice][token]."""
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        outputs: dict[str, list[list[int]]] = {}
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            self.add(GenerationRequest(str(i), "offline", tuple(prompt), one))
            outputs[str(i)] = [[] for _ in range(one.n)]
        while self.has_work:
            for item in self.step():
                for delta in item.deltas:
                    outputs[item.request_id][delta.choice] += delta.token_ids
        return [outputs[str(i)] for i in range(len(prompts))]


class StopWatch:
    """Looks for the stop strings of one sequence in its text, as the gateway will."""

    def __init__(self, tokenizer: TextDecoder, stop: tuple[str, ...]) -> None:
        self._text = IncrementalDetokenizer(tokenizer)
        self._filter = StopStringFilter(stop)

    def push(self, token_ids: list[int]) -> str | None:
        """Take tokens; the stop string that their text completes, if any."""
        self._filter.push(self._text.push(token_ids))
        return self._filter.matched
