"""The events of responses as messages of a WebSocket: each message is the JSON of one event."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from quire.gateway.errors.api_errors import ApiError, ApiKeyWrong, Parked, ShuttingDown
from quire.gateway.stream import sse

# Ends of responses that calls may continue.
_ENDS = ("event: response.completed\n", "event: response.incomplete\n")
# Errors that end a stream and not its response (`ResponseEvents.failure`), by code.
_ERRORS: dict[str | None, type[ApiError]] = {kind.code: kind for kind in (ApiKeyWrong, Parked, ShuttingDown)}


class SocketEvents:
    """The events of one response (an `EventWire`). has_begun: the response was accepted."""

    def __init__(self, note_end: Callable[[str], None]) -> None:
        """note_end: called with the JSON of the last event of a response that other calls may continue."""
        self._note_end = note_end
        self.has_begun = False

    async def open(self, request: web.Request) -> web.StreamResponse:
        self._request = request
        self.has_begun = True
        return web.Response()

    def frame(self, text: str) -> bytes:
        return b"".join(map(self._message, text.split("\n\n")))

    async def end(self, last: str) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        transport.write(self.frame(last))
        await self._request.writer.drain()

    def _message(self, event: str) -> bytes:
        """Return the message of a server-sent event; nothing for a comment, and for the end of a stream."""
        head, _, data = event.partition("data: ")
        if not data or data == sse.DONE:
            return b""
        if head.endswith(_ENDS):
            self._note_end(data)
        elif head.endswith("event: error\n"):
            data = _envelope(json.loads(data))
        return text_frame(data.encode("ascii"))


def _envelope(event: dict[str, Any]) -> str:
    """Return the event of an error after which only this stream of a response has ended."""
    kind = _ERRORS.get(event["code"], ApiError)
    error = {"type": kind.type, **{name: event[name] for name in ("code", "message", "param")}}
    return error_event(kind.status, error, sequence_number=event["sequence_number"])


def error_event(status: int, error: Mapping[str, Any], **fields: Any) -> str:
    """Return the JSON of the event of an error. Clients need its code to be a string."""
    error = {**error, "code": error["code"] or error["type"]}
    return sse.dumps({"type": "error", "status": status, "error": error, **fields})


def text_frame(data: bytes) -> bytes:
    """Return a text message of a server as one frame (RFC 6455, section 5.2)."""
    size = len(data)
    if size < 126:
        return struct.pack("!BB", 0x81, size) + data
    if size < 1 << 16:
        return struct.pack("!BBH", 0x81, 126, size) + data
    return struct.pack("!BBQ", 0x81, 127, size) + data
