"""Writes the answer to a call: as a stream of numbered events, or as one JSON body.

transcript -> dialect -> `EventRenderer` -> `StreamWriter` -> socket

In steady state the items of a frame are rendered and written while the frame is routed, without waking a task
(`StreamWriter._on_items`). The call's own task does the rest: the first and the last events, keepalives, reads of the
output log, and waiting for a client that does not read. Such a client holds a bounded amount of memory, and its
connection is closed after the write timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from aiohttp import web

from quire.gateway.api import error_responses, errors
from quire.gateway.stream import sse
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.cursor import split
from quire.gateway.stream.sse import BEGINNING, EventId
from quire.gateway.stream.transcript import Choice, ScoredTokens, Transcript
from quire.shared.messages import StepItem

# Bytes in the write buffer of a socket above which its client counts as slow. Up to `buffer.MAX_WAITING` tokens are
# buffered then, because tokens are smaller than events. All further tokens stay in the log.
BUFFER_BYTES = 16 * 1024
# Characters of a JSON body that are rendered before other tasks run. A longer body is sent while it is rendered.
PART_CHARACTERS = 64 * 1024


class AnswerFormat(Protocol):
    """Writes the answer to one call in a dialect. Events are complete except for their ids."""

    def opening(self) -> list[str]: ...
    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str: ...
    def finish(self, index: int, reason: str) -> str: ...
    def usage(self, usage: dict[str, int]) -> str: ...
    def full(self, choices: list[Choice], usage: dict[str, int]) -> Iterator[str]: ...


class WriteMeter(Protocol):
    """Counts the writes to one client (`telemetry.request_meter.CallMeter`)."""

    def stream_opened(self) -> None: ...
    def stream_closed(self) -> None: ...
    def wrote(self, tokens: int, came_at: float) -> None: ...
    def client_stalled(self) -> None: ...


class EventRenderer:
    """Renders the events of a stream from its beginning, and drops those up to `after`, which the client has.

    Rendering always begins at token 0: only then do detokenizer and stop-string filter repeat the first stream exactly.
    """

    def __init__(
        self, transcript: Transcript, dialect: AnswerFormat, headers: Mapping[str, str], after: EventId = BEGINNING
    ) -> None:
        """`headers`: of the client's request; they tell whether it can parse ids."""
        self._transcript = transcript
        self._dialect = dialect
        self._with_ids = sse.takes_ids(headers)
        self._after = after
        self._is_skipping = True
        # The id of the last event.
        self._tokens, self._step = BEGINNING
        self._parts: list[str] = []

    @property
    def reached(self) -> EventId:
        """The id of the last event, or of the last token if that made no event."""
        return max(EventId(self._tokens, self._step), EventId(self._transcript.tokens))

    def opening(self) -> str:
        """Renders the events before the first token."""
        for data in self._dialect.opening():
            self._add_at(0, data)
        return self._take()

    def feed(self, items: Sequence[StepItem]) -> str:
        """Renders the events of these items, and the end of the stream if the call has ended with them."""
        for item in items:
            if self._is_skipping:
                # `after` may lie inside an item: the first stream may have received the tokens in other portions.
                for part in split(item, self._after.tokens):
                    self._feed(part)
            else:
                self._feed(item)
        if self._transcript.ended:
            self._end()
        return self._take()

    def _feed(self, item: StepItem) -> None:
        dialect = self._dialect
        for choice, text, rest, reason, position, _, logprobs in self._transcript.feed(item):
            if text or logprobs is not None:
                self._add(position, 0, dialect.text(choice, text, logprobs))
            if reason is not None:
                if rest:
                    self._add_at(position, dialect.text(choice, rest))
                self._add_at(position, dialect.finish(choice, reason))

    def _end(self) -> None:
        transcript = self._transcript
        if transcript.error is not None:
            # Without [DONE], so that a client does not take this for the end of a complete answer.
            self._add_at(transcript.tokens, sse.event(errors.body(transcript.error)))
            return
        if transcript.metadata.include_usage:
            self._add_at(transcript.tokens, self._dialect.usage(transcript.usage))
        self._add_at(transcript.tokens, sse.event("[DONE]"))

    def _add_at(self, position: int, data: str) -> None:
        """Adds an event that brings no token: it is numbered within its position."""
        self._add(position, self._step + 1 if self._tokens == position else 1, data)

    def _add(self, tokens: int, step: int, data: str) -> None:
        # This runs for every token.
        self._tokens, self._step = tokens, step
        if self._is_skipping:
            if (tokens, step) <= self._after:
                return
            self._is_skipping = False
        if not self._with_ids:
            self._parts.append(data)
        else:
            self._parts.append(f"id: {EventId(tokens, step)}\n{data}" if step else f"id: {tokens}\n{data}")

    def _take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text


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
        self._is_chunked = False
        # The last events of the stream; they are written together with the end of the body.
        self._last = ""
        # Why nothing more can be written.
        self._failure: Exception | None = None

    async def run(self, beginning: str) -> web.StreamResponse:
        """Writes `beginning`, then all events until the call ends.

        Items that are buffered together are written together.

        Raises ConnectionError if the client has left or does not read.
        """
        # 1) Send the response's head at once: it tells the client that the call was accepted.
        response = web.StreamResponse(headers=sse.HEADERS)
        writer = await response.prepare(self._request)
        transport, protocol = self._request.transport, self._request.protocol
        if writer is None or transport is None:
            raise ConnectionResetError("the client has left")
        writer.send_headers()
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._transport, self._protocol = transport, protocol
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        if not self._is_chunked:
            response.force_close()  # HTTP/1.0: the end of the connection is the end of the body
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
                        await self._in_time(writer.drain())
                if self._failure is not None:
                    raise self._failure
            except ConnectionError:
                raise
            except Exception as error:  # the head has been sent, so the error becomes an event
                self._last = sse.event(errors.body(error_responses.unexpected(error, self._request)))
            # 4) Write the end.
            await self._in_time(response.write_eof(self._last.encode("ascii")))
            if self._last:
                self._meter.wrote(self._transcript.tokens, self._buffer.came_at)
        finally:
            self._buffer.sink = None
            self._meter.stream_closed()
        return response

    def _on_items(self) -> bool:
        """Writes the items that were fed. Returns False if the call's task must run."""
        try:
            self._write_items()
        except Exception as error:
            self._failure = error
        return self._failure is None and not self._transcript.ended and not self._protocol.writing_paused

    def _write_items(self) -> None:
        """Renders and writes the buffered items, unless the client is slow."""
        if self._protocol.writing_paused or self._transcript.ended or self._failure is not None:
            return
        is_due = self._buffer.keepalive_due
        text = self._events.feed(items := self._buffer.take())
        if self._transcript.ended:
            self._last = text
        elif text:
            self._write(text)
            self._meter.wrote(self._transcript.tokens, self._buffer.came_at)
        elif is_due and not items:
            self._write(sse.KEEPALIVE.decode("ascii"))

    def _write(self, text: str) -> None:
        # `text` is ASCII. This is the framing of aiohttp's writer without its coroutines.
        if self._transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._transport.write((f"{len(text):x}\r\n{text}\r\n" if self._is_chunked else text).encode("ascii"))

    async def _in_time(self, written: Awaitable[None]) -> None:
        await _in_time(self._request, written, self._write_timeout_s, self._meter)


async def collect(buffer: OutputBuffer, transcript: Transcript) -> list[Choice]:
    """Waits for the complete answer. Raises ApiError if a request failed."""
    count = transcript.metadata.choices
    texts: list[list[str]] = [[] for _ in range(count)]
    scored: list[list[ScoredTokens]] = [[] for _ in range(count)]
    reasons = [""] * count
    scores: list[float | None] = [None] * count
    while not transcript.ended:
        for item in await buffer.next():
            for delta in transcript.feed(item):
                texts[delta.choice] += (delta.text, delta.rest)
                if delta.logprobs is not None:
                    scored[delta.choice].append(delta.logprobs)
                if delta.finish_reason is not None:
                    reasons[delta.choice], scores[delta.choice] = delta.finish_reason, delta.score
    if transcript.error is not None:
        raise transcript.error
    logprobs = [ScoredTokens.join(parts) if parts else None for parts in scored]
    return list(map(Choice, map("".join, texts), reasons, scores, logprobs))


async def write_body(
    request: web.Request, parts: Iterable[str], meter: WriteMeter, write_timeout_s: float
) -> web.StreamResponse:
    """Writes an answer as one JSON body, given in parts.

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


async def _in_time(request: web.Request, written: Awaitable[None], timeout_s: float, meter: WriteMeter) -> None:
    """Waits for a slow client, for `timeout_s` at most; then closes its connection and raises ConnectionResetError."""
    try:
        async with asyncio.timeout(timeout_s):
            await written
    except TimeoutError:
        meter.client_stalled()
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has not read for {timeout_s:g} s") from None
