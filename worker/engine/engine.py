"""The engine: requests in, tokens out, one step at a time. Knows nothing of Redis or HTTP. Used by one thread.

`step()` schedules, executes, samples and collects. The results of a step are `StepItem`s: the new tokens of each
request, in order. A request that ranks several sequences (best_of, beam search) has a single item, at its end.

On a device that works asynchronously (`DeviceRunner`) the engine runs one step ahead: it launches a step before it
knows the tokens of the previous one, and collects these while the device computes. Until then PENDING stands for them
in their sequences. A sequence that turns out to have ended took part in one step too many; that token is dropped. If
penalties, banned words or a grammar need the tokens of the previous step, the engine launches the model, collects these
tokens while the device computes, and only then launches the choice of the new tokens. While any request needs more of
a step on the host (`SequenceGroup.is_synchronous`), the engine waits for every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import repeat

import numpy as np
import torch

from quire.kernels import Interrupt, StepInterrupted
from quire.shared.protocol.messages import (
    POOLINGS,
    SCORE,
    Delta,
    GenerationRequest,
    Outcome,
    PredictionCounts,
    StepItem,
)
from quire.shared.protocol.states import OutcomeName
from quire.shared.text.detokenizer import TokenDecoder as TextDecoder
from quire.worker.engine.blocks import BlockManager, cache_root, cache_scope
from quire.worker.engine.features.beams import BeamSearch, continue_beams
from quire.worker.engine.features.images import ImageEmbedder
from quire.worker.engine.features.pooling import Embedding, TokenLogits, pool
from quire.worker.engine.features.prompt_scores import PromptScores
from quire.worker.engine.features.thinking import with_budget
from quire.worker.engine.groups import DEFAULT_PRIORITY
from quire.worker.engine.in_flight import InFlightStep
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.integrity import check_groups
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.pace import PaceMeter
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.engine.paged_model import PagedModel
from quire.worker.engine.results import Results
from quire.worker.engine.runner import Runner, StepOutput
from quire.worker.engine.sampler import Sampler, bad_word_tokens, token_mask
from quire.worker.engine.sampling_inputs import SamplingInputs, finish_chunks
from quire.worker.engine.scheduler import Scheduler
from quire.worker.engine.sequence import DEAD_END, PENDING, GrammarStates, ScoredPrompt, Sequence, SequenceGroup
from quire.worker.engine.speculation import Speculation
from quire.worker.engine.step import PrefillChunk, Step
from quire.worker.engine.timing import StepTimes

log = logging.getLogger(__name__)


class Engine:
    """A continuous-batching engine over one model.

    tokenizer: detokenizes the output of requests with stop strings, and tokenizes bad words.
    name: the name of the model; it is part of the hashes of cached prefixes.
    blocks: a block manager to use instead of the paged one, for comparisons.
    runner: makes the runner; a DeviceRunner lets the engine run one step ahead.
    grammars: matchers for grammars; without them requests with a grammar are refused.
    """

    def __init__(
        self,
        model: PagedModel,
        limits: EngineLimits,
        eos_token_ids: tuple[int, ...],
        tokenizer: TextDecoder | None,
        name: str = "",
        blocks: BlockManager | None = None,
        runner: Callable[[PagedModel, EngineLimits, InputBatch], Runner] = Runner,
        grammars: GrammarStates | None = None,
    ):
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = model.vocab_size
        self.name = name
        if model.state_bytes and limits.num_state_slots < limits.max_num_seqs:
            raise ValueError(f"num_state_slots ({limits.num_state_slots}) must be at least max_num_seqs")
        self.scheduler = Scheduler(limits, blocks)
        self.groups = self.scheduler.groups
        self.input_batch = self.groups.input_batch
        self.runner = runner(model, limits, self.input_batch)
        self.sampler = Sampler(model.ops, eos_token_ids, self.input_batch)
        self.adapters = self.runner.adapters
        self.grammars = grammars
        # Unfinished requests by id.
        self.requests: dict[str, SequenceGroup] = {}
        self.num_steps = 0
        # Steps of lines of batches that ended without results, because a request of a higher class had arrived.
        self.num_interrupted_steps = 0
        # Another thread requests it when a request of a higher class arrives. `interrupt.clear` allows the next steps.
        self.interrupt = Interrupt()
        # Tokens computed as chunks and as decodes. Recomputation after preemption counts as chunks.
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        # Bounds the prompt tokens of a step by the step's time; if None, only the engine's limits bound them.
        self.pacer: PrefillPacer | None = None
        self.times = StepTimes()
        self.pace = PaceMeter(limits.max_num_seqs)
        # Embeds the images of prompts; None: requests with images are refused.
        self.images: ImageEmbedder | None = None
        # Why there is none although the model has images, for gateways.
        self.no_images = ""
        # Speculation: drafted tokens that steps compute too; None without.
        self.drafts: Speculation | None = None
        # Called with each scheduled step while the engine is being watched; must be quick and change nothing.
        self.observer: Callable[[Step], None] | None = None
        # Run check_integrity after every step (tests).
        self.checks_itself = False
        self._tokenizer = tokenizer
        self._results = Results(self.eos_token_ids, self.vocab_size, tokenizer, self._end, self._forget)
        self._num_arrivals = 0
        # Ids of synchronous requests. While there are any, no step is launched ahead.
        self._synchronous: set[str] = set()
        # Requests that rank their sequences, those included that have ended since the last `take_computed`.
        self._ranked: dict[str, SequenceGroup] = {}
        # The step that has been launched ahead, if any.
        self._in_flight: InFlightStep | None = None
        # Requests that the next step ends since an image is faulty, with the reason.
        self._faulty: list[tuple[str, str]] = []
        # Results that no call of `step` has returned yet. If a step fails they stay here, for `fail`.
        self._ready: list[StepItem] = []

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(
        self,
        request: GenerationRequest,
        earlier: tuple[StepItem, ...] = (),
        priority: int = DEFAULT_PRIORITY,
        pin_as: str | None = None,
        scores: ScoredPrompt | None = None,
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        """Add a request.

        earlier: the items that other attempts at the request emitted; the request continues after them.
        priority: 0 is the highest class. pin_as: the name under which the request's blocks are pinned at its end.
        scores: gets logits of the prompt, of a request without tokens to generate.
        pictures: the files of the images of the prompt, by digest.
        Raises RequestRefused, and changes nothing, if the request could not run even alone.
        """
        group, sampling = self.group_of(request, priority), request.sampling
        group.pin_as, group.is_reported, group.prompt_scores = pin_as, bool(earlier), scores
        outputs: dict[int, list[int]] = {}
        finished: dict[int, Delta] = {}
        for delta in (delta for item in earlier for delta in item.deltas):
            outputs.setdefault(delta.choice, []).extend(delta.token_ids)
            if delta.finish_reason:
                finished[delta.choice] = delta
        biased = [token for token, _ in sampling.logit_bias]
        given = (biased, sampling.allowed_token_ids, sampling.thinking_end, request.score_tokens)
        self._check_tokens(request.prompt, request.prediction, *outputs.values(), *given)
        if request.images:
            if self.images is None:
                raise RequestRefused(self.runner.model.why_no_images)
            group.images = self.images.of(request, pictures or {})
        self.scheduler.check_fits(group)
        if sampling.grammar and self.grammars is None:
            raise RequestRefused("an answer cannot be made to follow a grammar: this engine has no grammars")
        written = outputs
        if kept := group.kept:
            written = {choice: [*kept, *outputs.get(choice, ())] for choice in range(sampling.num_sequences)}
        matchers = self.grammars.resume(sampling, written) if self.grammars else {}
        self._share_blocks_of(request.forked_from)
        self._num_arrivals += 1
        group.start(outputs)
        if sampling.prompt_logprobs >= 0 and not group.is_reported:
            group.prompt_scores = PromptScores(request.prompt, sampling.prompt_logprobs)
        if request.pooling == SCORE:
            group.prompt_scores = TokenLogits(len(request.prompt), request.score_tokens)
        if sampling.beam_width:
            group.beams = BeamSearch(sampling, frozenset() if sampling.ignore_eos else self.eos_token_ids)
        for sequence in group.sequences:
            if sequence.choice in finished:
                sequence.finish_reason = finished[sequence.choice].finish_reason
            else:
                self._results.watch(sequence)
                grammar, output = matchers.get(sequence.choice), written.get(sequence.choice, ())
                sequence.matcher = with_budget(sampling, self.vocab_size, grammar, output)
        self.requests[request.id] = group
        if self.drafts is not None:
            self.drafts.expect(group, request.prediction)
        if not group.is_streamed:
            self._ranked[request.id] = group
        if group.is_synchronous:
            self._synchronous.add(request.id)
        self.groups.add(group)

    def _share_blocks_of(self, request_id: str) -> None:
        """Let the prefix cache find the blocks that a running request has computed, those of its output too."""
        if request_id in self.requests:
            # The tokens of the step in flight, and what it computes, are not known yet.
            self._collect_in_flight()
        if (group := self.requests.get(request_id)) is not None:
            for sequence in group.sequences:
                self.groups.cache_full_blocks(sequence)

    def group_of(self, request: GenerationRequest, priority: int = DEFAULT_PRIORITY) -> SequenceGroup:
        """Return the group of a request, not added and without sequences. Raises RequestRefused."""
        adapter = self.adapters.find(request.adapter, request.adapter_digest) if request.adapter else None
        sampling, root = request.sampling, cache_root(self.name, request.cache_salt, adapter.digest if adapter else "")
        group = SequenceGroup(request.id, request.prompt, sampling, self._num_arrivals, priority, root)
        group.pooling, group.adapter, group.cache_scope = request.pooling, adapter, cache_scope(request.cache_scope)
        group.breakpoints, group.pinned_for = request.breakpoints, request.pinned_for
        group.num_kept, group.first_choice = min(request.num_kept, len(request.prompt)), request.first_choice
        if request.pooling in POOLINGS and not self.runner.model.hidden_size:
            raise RequestRefused("this model gives no hidden states, so it makes no embeddings")
        words = bad_word_tokens(sampling.bad_words, self._tokenizer, self.vocab_size)
        # A ban of the marker that ends the reasoning would leave no token where it must come.
        group.bad_words = tuple(word for word in words if word[-1] not in sampling.thinking_end)
        if sampling.allowed_token_ids:
            group.allowed_tokens = token_mask(sampling.allowed_token_ids, self.vocab_size)
        return group

    def _check_tokens(self, prompt: SequenceOf[int], *outputs: SequenceOf[int]) -> None:
        """Raise RequestRefused for tokens with which a step, and every request in it, would fail."""
        if not prompt:
            raise RequestRefused("the prompt has no tokens")
        for token_ids in (prompt, *outputs):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
                raise RequestRefused(f"token id {max(token_ids)} is outside the vocabulary of {self.vocab_size}")

    def finish(self, request_id: str, outcome: str, detail: str = "") -> StepItem | None:
        """End a request early (cancelled, deadline, error): free all it holds, and return its last item.

        Returns None if the request has ended by itself, possibly in the step in flight: the next `step` returns its
        last item.
        """
        self._collect_in_flight()
        group = self.requests.get(request_id)
        if group is None:
            return None
        self._forget(group)
        end = Outcome(outcome, detail)
        for index, item in enumerate(self._ready):
            if item.request_id == request_id:
                return self._ready.pop(index)._replace(outcome=end)
        return StepItem(request_id, group.num_emitted, (), end)

    def fail(self, detail: str) -> list[StepItem]:
        """End all requests after a step that failed. The step in flight is dropped."""
        self._in_flight, ready, self._ready = None, self._ready, []
        ended = (self.finish(request_id, OutcomeName.ERROR, detail) for request_id in list(self.requests))
        return ready + [item for item in ended if item]

    def drop(self, request_id: str) -> None:
        """Forget a request that another worker has taken over."""
        self._collect_in_flight()
        self._ready = [item for item in self._ready if item.request_id != request_id]
        self._ranked.pop(request_id, None)
        if group := self.requests.get(request_id):
            self._forget(group)

    def take_computed(self) -> list[tuple[str, int]]:
        """Return the tokens computed so far for each request that ranks its sequences; once more after its end.

        Such a request emits nothing before its end, and then only the best sequences.
        """
        if not self._ranked:
            return []
        computed = [(request_id, group.num_generated) for request_id, group in self._ranked.items()]
        self._ranked = {request_id: group for request_id, group in self._ranked.items() if request_id in self.requests}
        return computed

    def prepare(self) -> bool:
        """Do one thing, while idle, that makes later steps faster. Returns False if there is nothing left to do."""
        if self.scheduler.spill is not None:
            self.scheduler.spill.save_idle()
        return self.runner.capture_next()

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[StepItem]:
        """Run one iteration: a new token for each running sequence in it, and several if drafted tokens are accepted.

        Returns the results known by its end.
        """
        started = self._begin_step()
        step: Step | None
        if self.runner.looks_ahead and not self._synchronous and not (self.drafts and self.drafts.is_due()):
            step = self._step_ahead()
        else:
            self._collect_in_flight()
            step = self._step_synchronously()
        if step is not None and step.num_tokens:
            self._end_step(step, started)
        if self.images is not None:
            self.images.end_step(step.num_tokens if step is not None else 1)
        ready, self._ready = self._ready, []
        return ready

    def _step_synchronously(self) -> Step | None:
        """Schedule, execute and sample one step. Returns None if the step was interrupted: it has no results."""
        step = self._schedule(self.drafts)
        if step.num_tokens:
            try:
                step, output = self._execute(step)
            except StepInterrupted:
                if self.drafts is not None:
                    self.drafts.drop(step)
                self.num_interrupted_steps += 1
                self.scheduler.note_interrupted()
                return None
            self.times.end_execute()
            logits = self._score_prompts(step, output.logits) if step.num_scored else output.logits
            embeddings = [] if output.hidden is None else pool(step.chunks, output.hidden)
            self._ready += self._choose(step, logits)
            self._end_prompts(step.chunks)
            self._ready += map(self._end_embedding, embeddings)
        return step

    def _score_prompts(self, step: Step, logits: torch.Tensor) -> torch.Tensor:
        """Score the prompt tokens of a step. Returns the logits without those of the scored positions."""
        at = sampled = len(logits) - step.num_scored
        for chunk in step.chunks:
            if chunk.num_scored and (scores := chunk.sequence.group.prompt_scores) is not None:
                scores.take(self.sampler.ops, logits[at : at + chunk.num_scored])
                at += chunk.num_scored
        return logits[:sampled]

    def _end_prompts(self, chunks: Iterable[PrefillChunk]) -> None:
        """End groups without tokens to generate, if their prompts are computed. Hidden states end their groups later.

        A group whose prompt has been scored needs no synchronous steps any more.
        """
        for chunk in chunks:
            sequence, group = chunk.sequence, chunk.sequence.group
            if group.pooling:
                if isinstance(scores := group.prompt_scores, TokenLogits) and scores.is_complete:
                    self._ready.append(self._end_embedding(Embedding(group, bytes(scores.records))))
                continue
            if not group.sampling.max_tokens:
                if sequence.num_computed >= sequence.num_prompt_tokens:
                    sequence.finish_reason = OutcomeName.LENGTH
                    self._ready.append(self._results.item(group, []))
            elif chunk.is_sampled and group.sampling.prompt_logprobs >= 0 and not group.is_synchronous:
                self._synchronous.discard(group.request_id)

    def _step_ahead(self) -> Step:
        """Schedule and launch one step, and collect the previous one while the device computes."""
        step, launched = self._schedule(), None
        if step.num_tokens:
            step, launched = self._launch(step)
        ended = self._collect_in_flight()
        self._in_flight = launched.without(ended) if launched is not None else None
        return step

    def _begin_step(self) -> float:
        """Start the clocks, and bound the prompt tokens of the step. Returns the pacer's time."""
        self.times.begin_step()
        self.pace.begin_step()
        faulty, self._faulty = self._faulty, []
        for request_id, reason in faulty:
            self._ready += filter(None, [self.finish(request_id, OutcomeName.ERROR, reason)])
        if self.images is not None:
            self.images.begin_step(self.pacer)
        if self.pacer is None:
            return 0.0
        self.scheduler.max_prefill_tokens = self.pacer.allowance
        return self.pacer.clock()

    def _end_step(self, step: Step, started: float) -> None:
        self.times.end_step(step)
        groups = self.groups
        self.pace.end_step(step, groups.num_free_rows() <= 0, groups.num_running, bool(self.requests))
        if self.pacer is not None:
            tower_s = self.images.pacer.step_s if self.images is not None else 0.0
            self.pacer.observe(step.num_decoding, step.num_prefill_tokens, self.pacer.clock() - started - tower_s)
        if self.checks_itself:
            self.check_integrity()

    def _schedule(self, drafts: Speculation | None = None) -> Step:
        """Return the next step. If it has no tokens, its moves of blocks are done already.

        drafts: adds drafted tokens. The host must know all tokens then.
        """
        self.times.begin_schedule()
        step = self.scheduler.schedule()
        if drafts is not None:
            drafts.add_to(step, self.scheduler.max_num_batched_tokens)
        self._embed_images(step)
        self.times.end_schedule()
        if self.observer is not None:
            self.observer(step)
        if not step.num_tokens:
            self.runner.move_blocks(step)  # a group was swapped in, and decodes from the next step on
        return step

    def _end_embedding(self, embedding: Embedding) -> StepItem:
        """End a request with the embedding of its prompt."""
        self._forget(embedding.group)
        return StepItem(embedding.group.request_id, 0, (), Outcome(OutcomeName.STOP, embedding=embedding.data))

    def _execute(self, step: Step) -> tuple[Step, StepOutput]:
        """Compute a step; if device memory runs out, schedule and compute a smaller one.

        Returns the step that was computed, and its output.
        """
        self.runner.interrupt = self.interrupt if self.scheduler.may_be_interrupted(step) else None
        while (output := self.runner.execute(step)) is None:
            tokens = max(step.num_tokens // 2, self.limits.max_num_seqs)
            log.warning("out of device memory in a step of %d tokens: from now on %d at most", step.num_tokens, tokens)
            self.scheduler.max_num_batched_tokens = tokens
            if self.drafts is not None:
                self.drafts.drop(step)
            step = self.scheduler.schedule()
            self._embed_images(step)
            if not step.num_tokens:  # all of its chunks had faulty images
                self.runner.move_blocks(step)
                return step, StepOutput(torch.empty((0, self.vocab_size)))
        return step, output

    def _embed_images(self, step: Step) -> None:
        if self.images is not None:
            self._faulty += self.images.embed(step, self.scheduler.max_num_batched_tokens)

    def _sampling_inputs(self, step: Step, logits: torch.Tensor) -> SamplingInputs:
        """Record what the step has computed. Returns the sequences that get a token, with their logits."""
        self.num_steps += 1
        self.num_decode_tokens += step.num_decoding
        self.num_prefill_tokens += step.num_prefill_tokens
        return finish_chunks(step, logits, self.groups)

    # --- a step ahead -------------------------------------------------------------------------------------------------

    def _launch(self, step: Step) -> tuple[Step, InFlightStep | None]:
        """Launch a step without waiting for the device to compute it.

        Collects the step in flight if sampling needs its tokens. Returns the launched step and its tokens in flight.
        The launched step is smaller than `step` if device memory ran out. The tokens are None if the step samples no
        token.
        """
        runner = self.runner
        tokens, scores = runner.decode(step), None
        if tokens is not None:
            batch = step.decodes
            self.num_steps += 1
            self.num_decode_tokens += len(batch)
            self.times.end_execute()
        else:
            step, output = self._execute(step)
            self.times.end_execute()
            inputs = self._sampling_inputs(step, output.logits)
            if inputs.batch.with_history:
                inputs = inputs.without(self._collect_in_flight())
            batch, logits = inputs
            if not batch:
                return step, None
            began = self.times.clock()
            with torch.inference_mode():
                scored = self.sampler.prepare(logits, batch.rows, batch.sequences)
                tokens = runner.sample(logits, batch.rows)
                scores = scored.launch(self.sampler.ops, runner.sampled) if scored is not None else None
            self.times.add_sampling(began)
        launched = InFlightStep.begin(batch, tokens, self.input_batch, scores)
        self.input_batch.last_tokens[batch.rows] = PENDING
        batch.append_tokens(repeat(PENDING))
        for index in np.flatnonzero(launched.is_last).tolist():
            self._leave(batch.sequences[index])
        return step, launched

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence whose last token is in flight from the next step, and free its blocks for later steps."""
        group = sequence.group
        self.groups.finish(sequence)
        if all(member.row < 0 for member in group.sequences):
            self.groups.remove(group)

    def _collect(self, step: InFlightStep) -> list[StepItem]:
        """Wait for the tokens of a launched step. Returns its results, and adds to `step.ended` what they end."""
        began = self.times.clock()
        tokens = step.wait()
        self.times.add_sampling(began)
        token_ids = tokens.tolist()
        step.batch.set_tokens(step.lengths.tolist(), token_ids)
        return self._results_of(step, tokens, token_ids)

    def _collect_in_flight(self) -> list[Sequence]:
        """Collect the step in flight, if any: afterwards the host knows all tokens.

        Returns the sequences that ended with it.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        self._ready += self._collect(step)
        return step.ended

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _choose(self, step: Step, logits: torch.Tensor) -> list[StepItem]:
        """Choose the tokens of a step whose tokens so far are all known. Returns the results.

        logits: those of the step, without scored positions.
        """
        if not step.verifications:
            return self._sample(self._sampling_inputs(step, logits))
        assert self.drafts is not None
        sampled = len(logits) - step.num_verified
        inputs = self._sampling_inputs(step, logits[:sampled])
        items = self.drafts.accept(step, inputs, logits[sampled:], self._sample)
        self.num_decode_tokens += step.num_accepted
        return items

    def _sample(self, inputs: SamplingInputs) -> list[StepItem]:
        """Sample one token for each sequence, by beam search or on its own. Returns the results."""
        items: list[StepItem] = []
        is_beam = self.input_batch.is_beam[inputs.batch.rows]
        if is_beam.any():
            searching, inputs = inputs.split(is_beam)
            for group, part in searching.by_group():
                if best := self._search(group, part):
                    items.append(self._results.item(group, best))
        return items + self._sample_tokens(inputs) if inputs.batch else items

    def _sample_tokens(self, inputs: SamplingInputs) -> list[StepItem]:
        """Sample one token for each sequence. Returns one item for each group that streams or ends."""
        batch, logits = inputs
        began = self.times.clock()
        tokens = self.sampler.sample(logits, batch.rows, batch.sequences)
        self.times.add_sampling(began)
        step = InFlightStep.begin(batch, tokens, self.input_batch)
        self.input_batch.last_tokens[batch.rows] = tokens
        token_ids = tokens.tolist()
        batch.append_tokens(token_ids)
        return self._results_of(step, tokens, token_ids)

    def _results_of(self, step: InFlightStep, tokens: np.ndarray, token_ids: list[int]) -> list[StepItem]:
        """Count tokens for penalties, advance grammars, end sequences, and return the items of a step.

        tokens: int32 [R], the new token of each sequence; token_ids: the same as a list.
        """
        dead_ends: dict[str, str] = {}
        for index in step.batch.with_history:
            sequence = step.batch.sequences[index]
            if sequence.seen is not None:
                sequence.seen.add(token_ids[index])
            if (matcher := sequence.matcher) is not None:
                matcher.consume(token_ids[index : index + 1])
                if matcher.error is not None:
                    dead_ends[sequence.group.request_id] = matcher.error
        items = self._results.of(step, tokens, token_ids)
        return self._end_dead_ends(step, items, dead_ends) if dead_ends else items

    def _end_dead_ends(self, step: InFlightStep, items: list[StepItem], dead_ends: dict[str, str]) -> list[StepItem]:
        """End requests whose answers cannot follow their grammars any more, without their tokens of this step.

        dead_ends: the error of each request. Returns the items with those of these requests replaced.
        """
        starts = {item.request_id: item.start for item in items}
        for request_id in dead_ends.keys() & self.requests.keys():
            step.ended.extend(self.requests[request_id].sequences)
            self._forget(self.requests[request_id])
        ends = {request_id: Outcome(OutcomeName.ERROR, f"{DEAD_END}: {why}") for request_id, why in dead_ends.items()}
        items = [item for item in items if item.request_id not in dead_ends]
        return items + [StepItem(request_id, starts.get(request_id, 0), (), end) for request_id, end in ends.items()]

    def _search(self, group: SequenceGroup, inputs: SamplingInputs) -> list[Delta]:
        """Run one step of a group's beam search. Returns the best beams if the search ends, else nothing."""
        search, beams = group.beams, inputs.batch.sequences
        assert isinstance(search, BeamSearch)
        if len(beams) < len(group.unfinished):
            raise AssertionError("the beams of a group are not in step")
        count = min(search.num_candidates, self.vocab_size)
        began = self.times.clock()
        logprobs, token_ids = self.sampler.top_logprobs(inputs.logits, inputs.batch.rows, beams, count)
        self.times.add_sampling(began)
        return continue_beams(self.groups, group, beams, logprobs, token_ids)

    def _end(self, sequence: Sequence, count: int) -> None:
        """Free what a sequence holds that has ended with its output token number `count`."""
        if sequence.group.pin_as is not None:
            self.groups.blocks.pin(sequence.group.pin_as, sequence)
        # A step that was launched ahead may have appended one token more.
        del sequence.token_ids[sequence.num_prompt_tokens + count :]
        self.groups.finish(sequence)

    def _forget(self, group: SequenceGroup) -> PredictionCounts | None:
        """Free all that a group holds. Returns the counts of its prediction, if it has one."""
        del self.requests[group.request_id]
        self.pace.note_end(group)
        counts = self.drafts.forget(group) if self.drafts is not None else None
        self._synchronous.discard(group.request_id)
        self._results.forget(group.sequences)
        self.groups.remove(group)
        return counts

    # --- state --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End threads and processes of the engine, after the last step."""
        if self.scheduler.spill is not None:
            self.scheduler.spill.close()
        self.runner.model.close()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight or self._ready)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all bookkeeping agrees."""
        check_groups(self.groups)
        known = {id(group) for group in self.requests.values()}
        held = {id(group) for group in self.groups.all_groups()}
        leaving = {id(sequence.group) for sequence in self._in_flight.batch.sequences} if self._in_flight else set()
        assert held <= known <= held | leaving, "scheduler and engine disagree on what is unfinished"
        live = {id(sequence) for group in self.requests.values() for sequence in group.unfinished}
        assert {id(sequence) for sequence in self._results.watched()} <= live, "a finished sequence is still watched"
