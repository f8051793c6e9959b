"""Writes the answer to a call: as a stream of numbered events, or as one JSON body.

transcript -> `AnswerFormat` -> `EventRenderer` -> `StreamWriter` -> socket

In steady state the items of a frame are rendered and written while the frame is routed, without waking a task
(`StreamWriter._on_items`). The call's own task does the rest: the first and the last events, keepalives, reads of the
output log, and waiting for a client that does not read. Such a client holds a bounded amount of memory, and its
connection is closed after the write timeout.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from quire.gateway.errors import api_errors, error_responses
from quire.gateway.output.parts import AnswerPart, merged
from quire.gateway.stream import sse
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.cursor import split
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.sse import BEGINNING, EventId
from quire.gateway.stream.transcript import Choice, TextDelta, Transcript
from quire.shared.config.schema_parts import Schema, record
from quire.shared.protocol.messages import StepItem

# Bytes in the write buffer of a socket above which its client counts as slow. Up to `buffer.MAX_WAITING` tokens are
# buffered then, because tokens are smaller than events. All further tokens stay in the log.
BUFFER_BYTES = 16 * 1024
# The fields of an answer whose requests say that it is not exact (`Outcome.is_exact`).
INEXACT = {"quire": {"exact": False}}
MARK: Schema = {"quire": record(exact={"const": False})}
# Characters of a JSON body that are rendered before other tasks run. A longer body is sent while it is rendered.
PART_CHARACTERS = 64 * 1024


class AnswerFormat(Protocol):
    """Writes the answer to one call in a dialect. Events are complete except for their ids.

    A call without a parser (`CallMetadata.output`) has `text` events, a call with one has `parts` events: one call of
    `parts` for each token that adds parts. Rendering begins at token 0 also for a resumed stream, so a format may keep
    state, such as the number of the next event.
    opens_late: whether `opening` needs the worker's report about the prompt, which comes with the first item.
    """

    opens_late: bool

    def opening(self, usage: dict[str, Any]) -> list[str]:
        """Return the events before the first token. usage: of the prompt; without the report unless `opens_late`."""
        ...

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str: ...
    def parts(self, index: int, parts: Sequence[AnswerPart], logprobs: ScoredTokens | None = None) -> list[str]: ...

    def prompt(self, first_choice: int, prompt: PromptText) -> Iterator[str]:
        """Return the events about the prompt of some choices, if the call asks for them. Its first token follows."""
        ...

    def finish(self, index: int, reason: str, stop_reason: str | int | None = None) -> list[str]: ...

    def mark(self) -> None:
        """Write INEXACT into the answer from now on. Called before the last `finish`."""
        ...

    def ending(self, usage: dict[str, Any]) -> list[str]:
        """Return the events after the last choice has finished."""
        ...

    def failure(self, error: api_errors.ApiError) -> list[str]:
        """Return the events after which the stream ends without a complete answer."""
        ...

    async def whole(self, buffer: OutputBuffer, transcript: Transcript) -> Iterator[str]:
        """Wait for the whole answer: pieces of one JSON object. Raises ApiError if a request failed."""
        ...


class ChoiceFormat(ABC):
    """A format that writes the whole answer from its choices."""

    opens_late = False

    @abstractmethod
    def full(self, choices: list[Choice], usage: dict[str, Any]) -> Iterator[str]:
        """Return the whole answer: pieces of one JSON object."""

    @abstractmethod
    def mark(self) -> None: ...

    async def whole(self, buffer: OutputBuffer, transcript: Transcript) -> Iterator[str]:
        choices = await collect(buffer, transcript)
        if not transcript.is_exact:
            self.mark()
        return self.full(choices, transcript.usage)


class StallMeter(Protocol):
    """Counts clients that do not read."""

    def client_stalled(self) -> None: ...


class WriteMeter(StallMeter, Protocol):
    """Counts the writes to one client (`telemetry.request_meter.CallMeter`)."""

    def stream_opened(self) -> None: ...
    def stream_closed(self) -> None: ...
    def wrote(self, tokens: int, came_at: float) -> None: ...


# Errors that end a stream but not its call.
_NO_ENDS = (api_errors.Parked, api_errors.ShuttingDown, api_errors.ApiKeyWrong)


class EventRenderer:
    """Renders the events of a stream from its beginning, and drops those up to `after`, which the client has.

    after: None is the beginning.
    Rendering always begins at token 0: only then do detokenizer and stop-string filter repeat the first stream exactly.
    """

    def __init__(
        self,
        transcript: Transcript,
        form: AnswerFormat,
        headers: Mapping[str, str],
        after: EventId | None = None,
        *,
        adds_ids: bool = True,
    ) -> None:
        """`headers`: of the client's request; they tell whether it can parse ids. `adds_ids`: False if the format
        numbers its events itself."""
        self._transcript = transcript
        self.form = form
        self._with_ids = adds_ids and sse.takes_ids(headers)
        self._shows_usage = transcript.metadata.continuous_usage
        self._after = after or BEGINNING
        self._is_skipping = True
        self._has_opened = False
        # The id of the last event.
        self._tokens, self._step = BEGINNING
        self._parts: list[str] = []

    @property
    def reached(self) -> EventId:
        """The id of the last event, or of the last token if that made no event."""
        return max(EventId(self._tokens, self._step), EventId(self._transcript.tokens))

    def opening(self) -> str:
        """Render the events before the first token, unless they come with the first item."""
        if not self.form.opens_late:
            self._open()
        return self._take()

    def _open(self) -> None:
        self._has_opened = True
        for data in self.form.opening({**self._transcript.usage, "completion_tokens": 0}):
            self._add_at(0, data)

    def feed(self, items: Sequence[StepItem]) -> str:
        """Render the events of these items, and the end of the stream if the call has ended with them."""
        for item in items:  # nearly always one
            if self._is_skipping:
                # `after` may lie inside an item: the first stream may have received the tokens in other portions.
                for part in split(item, self._after.tokens):
                    self._feed(part)
            else:
                self._feed(item)
        if self._transcript.ended:
            self._end()
        return self._take()

    def failure(self, error: api_errors.ApiError) -> list[str]:
        """Render the end of a stream that this gateway cannot complete, as events without ids: a client resumes after
        the event before them."""
        return self.form.failure(error)

    def _feed(self, item: StepItem) -> None:
        form, before = self.form, self._transcript.tokens
        text_deltas = self._transcript.feed(item)
        if not self._has_opened and form.opens_late and not isinstance(self._transcript.error, _NO_ENDS):
            self._open()
        if item.outcome is not None and not item.outcome.is_exact:
            form.mark()
        if item.report is not None:
            index, prompt = self._transcript.prompt_of(item.request_id)
            if prompt is not None:
                for data in form.prompt(index * self._transcript.metadata.n, prompt):
                    self._add_at(before, data)
        for choice, text, rest, reason, position, _, logprobs, stop_reason, parts, rest_parts in text_deltas:
            if parts is not None:
                if parts or logprobs is not None:
                    events = form.parts(choice, parts, logprobs)
                    if len(events) != 1 or self._tokens >= position or self._is_skipping or self._shows_usage:
                        self._add_all(position, events)
                    else:  # `_add` of the common case
                        self._tokens, self._step = position, 0
                        data = events[0]
                        self._parts.append(f"id: {position}\n{data}" if self._with_ids else data)
                if rest_parts:
                    self._add_all(position, form.parts(choice, rest_parts))
            elif text or logprobs is not None:
                data = form.text(choice, text, logprobs)
                if self._is_skipping or self._shows_usage or not self._with_ids:
                    self._add(position, 0, data)
                else:  # `_add` of the common case
                    self._tokens, self._step = position, 0
                    self._parts.append(f"id: {position}\n{data}")
            if reason is not None:
                if rest:
                    self._add_at(position, form.text(choice, rest))
                for data in form.finish(choice, reason, stop_reason):
                    self._add_at(position, data)

    def _end(self) -> None:
        transcript = self._transcript
        if isinstance(transcript.error, _NO_ENDS):  # without an id: a client resumes after the event before
            self._parts += self.form.failure(transcript.error)
            return
        if transcript.error is not None:
            events = self.form.failure(transcript.error)
        else:
            events = self.form.ending(transcript.usage)
        for data in events:
            self._add_at(transcript.tokens, data)

    def _add_at(self, position: int, data: str) -> None:
        """Add an event that brings no token: it is numbered within its position."""
        self._add(position, self._step + 1 if self._tokens == position else 1, data)

    def _add_all(self, position: int, events: Sequence[str]) -> None:
        """Add the events of one token; the first has the number of the position itself."""
        for data in events:
            if self._tokens < position:
                self._add(position, 0, data)
            else:
                self._add_at(position, data)

    def _add(self, tokens: int, step: int, data: str) -> None:
        # This runs for every token.
        self._tokens, self._step = tokens, step
        if self._is_skipping:
            if (tokens, step) <= self._after:
                return
            self._is_skipping = False
        if self._shows_usage:
            data = sse.with_usage(data, self._transcript.usage_at(tokens))
        if not self._with_ids:
            self._parts.append(data)
        else:
            self._parts.append(f"id: {EventId(tokens, step)}\n{data}" if step else f"id: {tokens}\n{data}")

    def _take(self) -> str:
        parts = self._parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        parts.clear()
        return text


class EventWire(Protocol):
    """Carries the events of a call to its client."""

    async def open(self, request: web.Request) -> web.StreamResponse:
        """Tell the client that the call was accepted. Raises ConnectionResetError if it has left."""
        ...

    def frame(self, text: str) -> bytes:
        """Return events, or KEEPALIVE, as the bytes of the connection."""
        ...

    async def end(self, last: str) -> None:
        """Write the last events."""
        ...


class HttpEvents:
    """Events as the body of an HTTP answer."""

    def __init__(self) -> None:
        self._response = web.StreamResponse(headers=sse.HEADERS)
        self._is_chunked = False

    async def open(self, request: web.Request) -> web.StreamResponse:
        response = self._response
        writer = await response.prepare(request)
        if writer is None:
            raise ConnectionResetError("the client has left")
        writer.send_headers()
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        if not self._is_chunked:
            response.force_close()  # HTTP/1.0: the end of the connection is the end of the body
        return response

    def frame(self, text: str) -> bytes:
        # `text` is ASCII. This is the framing of aiohttp's writer without its coroutines.
        return (f"{len(text):x}\r\n{text}\r\n" if self._is_chunked else text).encode("ascii")

    async def end(self, last: str) -> None:
        """Write the last events together with the end of the body."""
        await self._response.write_eof(last.encode("ascii"))


# The wire of a request whose events are not the body of its answer.
WIRE = web.RequestKey("wire", EventWire)


class StreamWriter:
    """Writes the events of one call to its client."""

    def __init__(
        self,
        request: web.Request,
        buffer: OutputBuffer,
        transcript: Transcript,
        events: EventRenderer,
        meter: WriteMeter,
        write_timeout_s: float,
    ) -> None:
        self._request = request
        self._buffer = buffer
        self._transcript = transcript
        self._events = events
        self._meter = meter
        self._write_timeout_s = write_timeout_s
        self._wire: EventWire = request.get(WIRE) or HttpEvents()
        # The last events of the stream.
        self._last = ""
        # Why nothing more can be written.
        self._failure: Exception | None = None

    async def run(self, beginning: str) -> web.StreamResponse:
        """Write `beginning`, then all events until the call ends.

        Items that are buffered together are written together.

        Raises ConnectionError if the client has left or does not read.
        """
        # 1) Send the response's head at once: it tells the client that the call was accepted.
        response = await self._wire.open(self._request)
        transport, protocol = self._request.transport, self._request.protocol
        if transport is None:
            raise ConnectionResetError("the client has left")
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._transport, self._protocol = transport, protocol
        self._meter.stream_opened()
        try:
            # 2) Write what a resumed stream has read from the log already.
            if beginning:
                self._write(beginning)
                self._meter.wrote(self._transcript.tokens, 0.0)
            # 3) From now on the router writes through `_on_items`; this task wakes up only if that returns False.
            self._buffer.sink = self._on_items
            try:
                while not self._transcript.ended and self._failure is None:
                    await self._buffer.ready()
                    self._write_items()
                    if protocol.writing_paused:
                        await self._in_time(self._request.writer.drain())
                if self._failure is not None:
                    raise self._failure
            except ConnectionError:
                raise
            except Exception as error:  # the head has been sent, so the error becomes an event
                self._last = "".join(self._events.failure(error_responses.unexpected(error, self._request)))
            # 4) Write the end.
            await self._in_time(self._wire.end(self._last))
            if self._last:
                self._meter.wrote(self._transcript.tokens, self._buffer.came_at)
        finally:
            self._buffer.sink = None
            self._meter.stream_closed()
        return response

    def _on_items(self) -> bool:
        """Write the items that were fed. Returns False if the call's task must run."""
        try:
            return self._write_items() and not self._protocol.writing_paused
        except Exception as error:
            self._failure = error
            return False

    def _write_items(self) -> bool:
        """Render and write the buffered items, unless the client is slow. Returns False if nothing more can be
        written by this method."""
        buffer, transcript = self._buffer, self._transcript
        if self._protocol.writing_paused or self._failure is not None or transcript.ended:
            return False
        is_due = buffer.keepalive_due
        text = self._events.feed(items := buffer.take())
        if transcript.ended:
            self._last = text
            return False
        if text:
            self._write(text)
            self._meter.wrote(transcript.tokens, buffer.came_at)
        elif is_due and not items:
            self._write(sse.KEEPALIVE.decode("ascii"))
        return True

    def _write(self, text: str) -> None:
        if self._transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._transport.write(self._wire.frame(text))

    async def _in_time(self, written: Awaitable[None]) -> None:
        await _in_time(self._request, written, self._write_timeout_s, self._meter)


async def deltas(buffer: OutputBuffer, transcript: Transcript) -> AsyncIterator[TextDelta]:
    """Wait for the texts of all tokens up to the end of the call. Raises ApiError at the end if a request failed."""
    while not transcript.ended:
        for item in await buffer.next():
            for delta in transcript.feed(item):
                yield delta
    if transcript.error is not None:
        raise transcript.error


async def collect(buffer: OutputBuffer, transcript: Transcript) -> list[Choice]:
    """Wait for the complete answer. Raises ApiError if a request failed."""
    count = transcript.metadata.choices
    texts: list[list[str]] = [[] for _ in range(count)]
    scored: list[list[ScoredTokens]] = [[] for _ in range(count)]
    reasons = [""] * count
    scores: list[float | None] = [None] * count
    parts: list[list[AnswerPart]] = [[] for _ in range(count)]
    stop_reasons: list[str | int | None] = [None] * count
    async for delta in deltas(buffer, transcript):
        texts[delta.choice] += (delta.text, delta.rest)
        if delta.parts is not None:
            parts[delta.choice] += (*delta.parts, *delta.rest_parts)
        if delta.logprobs is not None:
            scored[delta.choice].append(delta.logprobs)
        if delta.finish_reason is not None:
            reasons[delta.choice], scores[delta.choice] = delta.finish_reason, delta.score
            stop_reasons[delta.choice] = delta.stop_reason
    logprobs = [ScoredTokens.join(parts) if parts else None for parts in scored]
    prompts = [prompt for prompt in transcript.prompts for _ in range(transcript.metadata.n)]
    made = map(merged, parts)
    return list(map(Choice, map("".join, texts), reasons, scores, logprobs, stop_reasons, prompts, made))


async def write_body(
    request: web.Request, parts: Iterable[str], meter: StallMeter, write_timeout_s: float
) -> web.StreamResponse:
    """Write an answer as one JSON body, given in parts.

    Raises ConnectionError if the client has left or does not read.
    """
    response: web.StreamResponse | None = None
    text = ""
    for part in parts:
        text += part
        if len(text) < PART_CHARACTERS:
            continue
        if response is None:
            response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
            await response.prepare(request)
            if response.headers.get("Transfer-Encoding") != "chunked":
                response.force_close()  # HTTP/1.0: the end of the connection is the end of the body
        await _in_time(request, response.write(text.encode()), write_timeout_s, meter)
        await asyncio.sleep(0)
        text = ""
    if response is None:
        return web.Response(text=text, content_type="application/json")
    await _in_time(request, response.write_eof(text.encode()), write_timeout_s, meter)
    return response


async def _in_time(request: web.Request, written: Awaitable[None], timeout_s: float, meter: StallMeter) -> None:
    """Wait for a slow client, for `timeout_s` at most; then close its connection and raise ConnectionResetError."""
    try:
        async with asyncio.timeout(timeout_s):
            await written
    except TimeoutError:
        meter.client_stalled()
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has not read for {timeout_s:g} s") from None
