"""The answer to a call on its way to the client: as a stream of events, or in one piece.

In steady state what workers publish is rendered and written as it is fed, without waking a task (`_on_items`). The
call's task has the rest: the beginning and the end, signs of life, what must be read from the log, and a client that
does not read, whose buffer here is bounded and who is cut when nothing has moved for the write timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable

from aiohttp import web

from quire.gateway.admin.request_meter import METER
from quire.gateway.api import error_responses, errors
from quire.gateway.stream import sse
from quire.gateway.stream.events import Events
from quire.gateway.stream.transcript import Transcript

# What may wait for a client in its socket's buffer in this process before it counts as slow. More waits as tokens,
# which are smaller than events (`MAX_WAITING`), and then in the log.
BUFFER_BYTES = 16 * 1024
# Of an answer in one piece: what is rendered before others get their turn. A longer one is sent as it is rendered.
PART_CHARACTERS = 64 * 1024


class StreamWriter:
    """Writes the events of one call."""

    def __init__(self, request: web.Request, answer: Transcript, events: Events, write_timeout_s: float) -> None:
        self._request = request
        self._answer = answer
        self._outputs = answer.outputs
        self._events = events
        self._write_timeout_s = write_timeout_s
        self._meter = request[METER]
        self._is_chunked = False
        # The events of the end, which leave together with that of the body.
        self._last = ""
        # Why nothing more can be written.
        self._failure: Exception | None = None

    async def run(self, beginning: str) -> web.StreamResponse:
        """Write `beginning`, then events as they come; what waits together is written together.

        Raises ConnectionError if the client left, or does not read.
        """
        meters = self._meter.meters
        response = web.StreamResponse(headers=sse.HEADERS)
        writer = await response.prepare(self._request)
        transport, protocol = self._request.transport, self._request.protocol
        if writer is None or transport is None:
            raise ConnectionResetError("the client has left")
        writer.send_headers()  # the client learns at once that it was accepted
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._transport, self._protocol = transport, protocol
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        if not self._is_chunked:
            response.force_close()  # HTTP/1.0: only the end of the connection ends the body
        meters.open_streams += 1
        try:
            if beginning:
                self._write(beginning)
                self._meter.wrote(self._answer.tokens, 0.0)
            self._outputs.sink = self._on_items
            try:
                while not self._answer.ended and self._failure is None:
                    await self._outputs.ready()
                    self._give()
                    if protocol.writing_paused:
                        await self._in_time(writer.drain())
                if self._failure is not None:
                    raise self._failure
            except ConnectionError:
                raise
            except Exception as error:  # the head has left, so that it can only be told as an event
                self._last = sse.event(errors.body(error_responses.unexpected(error, self._request)))
            await self._in_time(response.write_eof(self._last.encode("ascii")))
            if self._last:
                self._meter.wrote(self._answer.tokens, self._outputs.came_at)
        finally:
            self._outputs.sink = None
            meters.open_streams -= 1
        return response

    def _on_items(self) -> bool:
        """Something was fed: write it; False where the task has something to do."""
        try:
            self._give()
        except Exception as error:
            self._failure = error
        return self._failure is None and not self._answer.ended and not self._protocol.writing_paused

    def _give(self) -> None:
        """Write what waits, if the client has room for it."""
        if self._protocol.writing_paused or self._answer.ended or self._failure is not None:
            return
        is_due = self._outputs.keepalive_due
        text = self._events.feed(items := self._outputs.take())
        if self._answer.ended:
            self._last = text
        elif text:
            self._write(text)
            self._meter.wrote(self._answer.tokens, self._outputs.came_at)
        elif is_due and not items:
            self._write(sse.KEEPALIVE.decode("ascii"))

    def _write(self, text: str) -> None:
        # All of it is ASCII. That is aiohttp's own framing, less its coroutines.
        if self._transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._transport.write((f"{len(text):x}\r\n{text}\r\n" if self._is_chunked else text).encode("ascii"))

    async def _in_time(self, written: Awaitable[None]) -> None:
        await _in_time(self._request, written, self._write_timeout_s)


async def send_whole(request: web.Request, pieces: Iterable[str], write_timeout_s: float) -> web.StreamResponse:
    """Write an answer in one piece, which is JSON in several.

    Raises ConnectionError if the client left, or does not read.
    """
    response: web.StreamResponse | None = None
    text = ""
    for piece in pieces:
        text += piece
        if len(text) < PART_CHARACTERS:
            continue
        if response is None:
            response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
            await response.prepare(request)
            if response.headers.get("Transfer-Encoding") != "chunked":
                response.force_close()  # HTTP/1.0: only the end of the connection ends the body
        await _in_time(request, response.write(text.encode()), write_timeout_s)
        await asyncio.sleep(0)
        text = ""
    if response is None:
        return web.Response(text=text, content_type="application/json")
    await _in_time(request, response.write_eof(text.encode()), write_timeout_s)
    return response


async def _in_time(request: web.Request, written: Awaitable[None], timeout_s: float) -> None:
    """Wait for a client that is slow, but not for ever."""
    try:
        async with asyncio.timeout(timeout_s):
            await written
    except TimeoutError:
        request[METER].meters.slow_clients += 1
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has not read for {timeout_s:g} s") from None
