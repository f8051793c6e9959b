"""One request at upstreams: a stream for each choice, and the step items that are made of their tokens.

A broken stream is continued: the prompt and the tokens so far are the prompt of the next stream. Such an answer is not
exact, since another computation draws its rest; its outcome says so.

A grammar begins with the answer, and no server continues it. Such an answer is asked for again from its beginning, and
goes on if it begins with the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

from tokenizers import Tokenizer

from quire.shared.process.backoff import Backoff
from quire.shared.protocol.messages import BY_TOKEN, Delta, GenerationRequest, Outcome, PromptReport, StepItem
from quire.shared.protocol.messages.codec import pack_token_ids
from quire.shared.protocol.states import OutcomeName
from quire.worker.engine.stop_strings import StopStringMatcher
from quire.worker.upstream.answers import Chunk, read_completion, read_native, records_of
from quire.worker.upstream.capabilities import Capabilities
from quire.worker.upstream.client import StreamBroken, UpstreamBusy, UpstreamDown, UpstreamRefused
from quire.worker.upstream.pool import Upstream, UpstreamPool
from quire.worker.upstream.requests import ChoiceRequest, path_and_body
from quire.worker.upstream.texts import TextTokenizer

log = logging.getLogger(__name__)

# Streams of a choice that may break one after the other without a token. A request that ends its upstream each time
# must not go on to all of them.
MAX_BREAKS = 3
RETRY_S = (0.1, 2.0)


class _Choice:
    """One choice: its tokens so far, and how it ended."""

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.index = index
        self.output: list[int] = []
        self.reason: str | None = None
        self.matched_stop: str | None = None
        # Streams that broke since its last token.
        self.num_breaks = 0
        self._sampling = sampling
        self._matcher = (
            StopStringMatcher(tokenizer, sampling.stop, sampling.skip_special_tokens) if sampling.stop else None
        )

    def take(self, token: int, eos_token_ids: frozenset[int]) -> None:
        """Add a token, which may end the choice."""
        sampling = self._sampling
        self.output.append(token)
        matched = self._matcher.push([token]) if self._matcher is not None else None
        if token in eos_token_ids and not sampling.ignore_eos:
            self.reason = OutcomeName.STOP
        elif token in sampling.stop_token_ids:
            self.reason, self.matched_stop = OutcomeName.STOP, BY_TOKEN
        elif matched is not None:
            self.reason, self.matched_stop = OutcomeName.STOP, matched
        elif len(self.output) >= sampling.max_tokens:
            self.reason = OutcomeName.LENGTH


class Generation:
    """An attempt at a request. `emit(item)` is called on the event loop for each item of it."""

    def __init__(
        self,
        request: GenerationRequest,
        earlier: tuple[StepItem, ...],
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        emit: Callable[[StepItem], None],
    ) -> None:
        self.request = request
        self.has_ended = False
        # Streams that an upstream sends tokens of now.
        self.num_streams = 0
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._emit = emit
        self._choices = [_Choice(index, request, tokenizer) for index in range(request.sampling.n)]
        self._emitted = earlier[-1].end if earlier else 0
        # A grammar: the whole answer is that of one stream.
        self._is_repeated = bool(request.sampling.grammar)
        self._is_exact = not self._emitted or self._is_repeated
        self._is_reported = bool(earlier)
        # Ends of choices without a token: a log has no item without tokens, so they go with the next one.
        self._held: list[Delta] = []
        for delta in (delta for item in earlier for delta in item.deltas):
            choice = self._choices[delta.choice]
            for token in delta.token_ids:
                choice.take(token, eos_token_ids)
            choice.reason = delta.finish_reason or choice.reason

    @property
    def is_suspect(self) -> bool:
        """True if a stream of it broke without a token: it may be what ends upstreams, and must not go on to others."""
        return any(choice.num_breaks for choice in self._choices)

    async def run(self, pool: UpstreamPool, rows: asyncio.Semaphore) -> None:
        """Run the choices that have not ended, to the end of the request. rows: bounds the streams of the worker."""
        try:
            if not self.request.sampling.max_tokens:  # the prompt is wanted, and no answer
                for choice in self._choices:
                    choice.reason = OutcomeName.LENGTH
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    if choice.reason is None:
                        group.create_task(self._complete(choice, pool, rows))
        except* UpstreamRefused as refused:
            self.end(OutcomeName.ERROR, f"the upstream refuses the request: {refused.exceptions[0]}")
        except* Exception as errors:
            log.error("request %s failed", self.request.id, exc_info=errors, extra={"request_id": self.request.id})
            self.end(OutcomeName.ERROR, "the worker could not read the upstream's answer")
        if not self.has_ended and all(choice.reason is not None for choice in self._choices):
            self._put([], ended=True)

    def end(self, outcome: str, detail: str = "") -> None:
        """End the request early, with an item that says so."""
        if not self.has_ended:
            self.has_ended = True
            self._emit(StepItem(self.request.id, self._emitted, (), Outcome(outcome, detail)))

    async def _complete(self, choice: _Choice, pool: UpstreamPool, rows: asyncio.Semaphore) -> None:
        """Run streams until the choice has ended. Raises UpstreamRefused."""
        backoff = Backoff(*RETRY_S, jitter=True)
        while choice.reason is None:
            if not pool.num_usable:
                await pool.wait(RETRY_S[1])
                continue
            before = len(choice.output)
            async with rows:
                broken = await self._try(choice, pool)
            if len(choice.output) > before:
                choice.num_breaks = 0
                backoff.reset()
            elif broken is not None:
                choice.num_breaks += 1
                if choice.num_breaks >= MAX_BREAKS:
                    why = f"{MAX_BREAKS} streams broke one after the other without a token; the last one: {broken}"
                    raise UpstreamRefused(why)
            if choice.reason is None:
                await asyncio.sleep(backoff.next())

    async def _try(self, choice: _Choice, pool: UpstreamPool) -> StreamBroken | None:
        """Run a stream, if an upstream is usable. Returns why it has broken. Raises UpstreamRefused."""
        upstream = pool.choose(self.request.sampling)
        if upstream is None:
            return None
        try:
            await self._stream(choice, upstream)
        except UpstreamBusy as error:
            log.debug("upstream %s is busy: %s", upstream.url, error)
        except UpstreamDown as error:
            upstream.lost(str(error))
        except StreamBroken as error:
            upstream.num_breaks += 1
            upstream.doubt(str(error))
            log.warning(
                "a stream of request %s at upstream %s broke; the answer has %d tokens, and is continued: %s",
                self.request.id,
                upstream.url,
                len(choice.output),
                error,
                extra={"request_id": self.request.id},
            )
            return error
        return None

    async def _stream(self, choice: _Choice, upstream: Upstream) -> None:
        """Run one stream of a choice. Raises StreamBroken if it ends before the choice has ended."""
        capabilities = upstream.capabilities
        assert capabilities is not None
        known = tuple(choice.output) if self._is_repeated else ()
        if choice.output and not known:
            self._is_exact = False
            upstream.num_continued += 1
        asked = ChoiceRequest(self.request, choice.index, () if known else tuple(choice.output))
        path, body = path_and_body(asked, capabilities, self._tokenizer)
        texts, has_ids = TextTokenizer(self._tokenizer, asked.output), False
        upstream.num_streams += 1
        self.num_streams += 1
        try:
            async with aclosing(upstream.client.stream(path, body)) as events:
                async for event in events:
                    chunk = self._read(event, capabilities)
                    if chunk is None:
                        continue
                    has_ids = has_ids or bool(chunk.token_ids)
                    if chunk.text and not has_ids and capabilities.returns_ids:
                        raise StreamBroken("it sends text without token ids")
                    token_ids = self._tokens_of(chunk, capabilities, texts)
                    count = len(token_ids) if chunk.reason is None else max(len(known), len(token_ids))
                    if known[:count] != token_ids[: len(known)]:
                        raise UpstreamRefused("it does not repeat the answer that broke; send the request again")
                    chunk, token_ids, known = chunk.without_first(len(known)), token_ids[len(known) :], known[count:]
                    upstream.num_tokens += self._push(choice, chunk, token_ids)
                    if choice.reason is not None:
                        return
        finally:
            upstream.num_streams -= 1
            self.num_streams -= 1
        raise StreamBroken("its stream ended without a reason")

    def _read(self, event: dict[str, object], upstream: Capabilities) -> Chunk | None:
        if upstream.is_native:
            return read_native(event, self._vocab_size)
        return read_completion(event, self._vocab_size, upstream.returns_ids, self.request.sampling.logprobs)

    def _tokens_of(self, chunk: Chunk, upstream: Capabilities, texts: TextTokenizer) -> tuple[int, ...]:
        """Return the tokens of a chunk."""
        if chunk.token_ids is None:
            return texts.push(chunk.text) if chunk.text else ()
        # A streaming llama.cpp server leaves out the ids of all tokens of a character but the last one.
        if upstream.is_native and chunk.text and not texts.says(chunk.token_ids, chunk.text):
            return texts.push(chunk.text)
        return texts.take(chunk.token_ids)

    def _push(self, choice: _Choice, chunk: Chunk, token_ids: Sequence[int]) -> int:
        """Add the tokens of a chunk to a choice, up to its end, and emit them. Returns their number."""
        records, count = None, 0
        if self.request.sampling.logprobs and token_ids:  # before any token is taken: they may be wrong
            records = records_of(chunk, self.request.sampling.top_logprobs)
        for token in token_ids:
            choice.take(token, self._eos_token_ids)
            count += 1
            if choice.reason is not None:
                break
        if choice.reason is None:
            choice.reason = chunk.reason
        if not count and choice.reason is None:
            return 0
        if records is not None:
            records = records[: len(records) // len(token_ids) * count]
        delta = Delta(choice.index, tuple(token_ids[:count]), choice.reason, choice.matched_stop, None, records)
        self._put([delta], ended=all(one.reason is not None for one in self._choices))
        return count

    def _put(self, deltas: list[Delta], ended: bool) -> None:
        """Emit deltas, and the end of the request with the last ones."""
        if self.has_ended:
            return
        self._held += deltas
        if not ended and not any(delta.token_ids for delta in self._held):
            return
        deltas, self._held = self._held, []
        self.has_ended = ended
        outcome = report = None
        if ended:
            reached = any(choice.reason == OutcomeName.LENGTH for choice in self._choices)
            outcome = Outcome(OutcomeName.LENGTH if reached else OutcomeName.STOP, is_exact=self._is_exact)
        if not self._is_reported:
            self._is_reported = True
            if self.request.sampling.returns_prompt:
                report = PromptReport(prompt=pack_token_ids(self.request.prompt))
        item = StepItem(self.request.id, self._emitted, tuple(deltas), outcome, report)
        self._emitted = item.end
        self._emit(item)
