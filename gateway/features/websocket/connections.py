"""GET /v1/responses: a WebSocket whose messages create responses, one after the other.

A message is the body of a `POST /v1/responses`, and becomes a request of its own: it passes the middlewares and the
handler of such a request, so that checks, keys, limits, metrics and logs are the same. Only its events take another
way (`SocketEvents`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import WSCloseCode, WSMessage, WSMsgType, hdrs, web
from multidict import CIMultiDict

from quire.gateway.api.body_budget import hold_body, release_body
from quire.gateway.api.headers import IDEMPOTENCY_KEY, add_request_headers
from quire.gateway.api.parsing import BODY, max_values, parse_object
from quire.gateway.api.responses.chain import CHAIN, Chain, ChainMemory
from quire.gateway.errors.api_errors import ApiError, InvalidRequest, MethodNotAllowed, ShuttingDown, body, refused
from quire.gateway.features.websocket.incoming import IncomingMessage
from quire.gateway.features.websocket.socket_events import SocketEvents, error_event
from quire.gateway.serving.service import GatewayProcess
from quire.gateway.stream.writer import WIRE
from quire.shared.config.validators import shown
from quire.shared.process.tasks import end_tasks

log = logging.getLogger("gateway")

PATH = "/v1/responses"
# Seconds after which a connection takes no more messages, as at OpenAI.
MAX_AGE_S = 3600.0
# Messages of a connection that wait for the end of its response.
MAX_WAITING = 16
# Pings in a row without an answer after which the client counts as gone.
MAX_MISSED = 2
# Seconds that a client has to answer when the connection is closed.
CLOSE_S = 1.0
# Headers of the handshake that a message does not have. An idempotency key stands for one call.
_DROPPED = (hdrs.CONNECTION, hdrs.UPGRADE, IDEMPOTENCY_KEY)
_WEBSOCKET = "sec-websocket-"
# Parameters that have only one value here, and why.
_FIXED = {
    "stream": (True, "over a WebSocket a response is always streamed"),
    "background": (False, "a response over a WebSocket is not in the background"),
}


class WebSockets:
    """The connections of a process."""

    def __init__(self, process: GatewayProcess) -> None:
        self._process = process
        settings = process.settings
        self._memory = ChainMemory(settings.max_bodies_bytes // 4, settings.max_conversation_bytes)
        self._open: set[_Socket] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses: open a connection, and serve it until it is closed."""
        if request.headers.get(hdrs.UPGRADE, "").lower() != "websocket":
            raise MethodNotAllowed(
                f"GET {PATH} is for WebSockets; use POST.",
                headers={hdrs.ALLOW: hdrs.METH_POST, hdrs.UPGRADE: "websocket"},
            )
        if self._process.draining:
            raise ShuttingDown("This gateway is shutting down; connect again.")
        connection = _Socket(request, self._process, Chain(self._memory))
        self._open.add(connection)
        try:
            return await connection.run()
        finally:
            self._open.discard(connection)

    async def leave(self, app: web.Application) -> None:
        """Close all connections, because the process ends; those with a response that runs after its end."""
        await asyncio.gather(*(connection.leave() for connection in self._open))


@dataclass(frozen=True, slots=True)
class _Message:
    """A message as a request. data: its bytes, or why it is refused."""

    request: web.Request
    data: bytes | ApiError


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a connection, after the messages before. error: the last event; none if it is empty."""

    code: int
    error: str = ""


class _Socket:
    """One connection: a task reads messages, and another one serves them."""

    def __init__(self, request: web.Request, process: GatewayProcess, chain: Chain) -> None:
        self._request, self._process, self._chain = request, process, chain
        settings = process.settings
        self._max_bytes, self._ping_s = settings.max_body_bytes, settings.keepalive_s
        self._body_timeout_s, self._write_timeout_s = settings.body_timeout_s, settings.write_timeout_s
        self._messages: asyncio.Queue[_Message | _End] = asyncio.Queue()
        self._is_serving = self._is_ending = False
        self._server: asyncio.Task[None] | None = None
        self._socket = web.WebSocketResponse(
            timeout=CLOSE_S,
            autoclose=False,
            autoping=False,
            compress=False,
            max_msg_size=self._max_bytes + 1,
            decode_text=False,
        )
        self._incoming = IncomingMessage(request, self._max_bytes, self._body_timeout_s, self._close)

    async def run(self) -> web.StreamResponse:
        await self._socket.prepare(self._request)
        protocol: Any = self._request.protocol
        protocol.received = self._incoming.add
        self._server = asyncio.create_task(self._serve())
        try:
            await self._read()
        finally:
            protocol.received = None
            # The task that reads is cancelled when the connection is lost, perhaps while it waits here.
            try:
                await end_tasks(self._server)
            finally:
                self._release()
        return self._socket

    async def leave(self) -> None:
        """Close the connection, after the response that runs."""
        self._end(_End(WSCloseCode.GOING_AWAY))
        if self._server is not None and not self._is_serving:
            await asyncio.wait([self._server], timeout=2 * CLOSE_S)

    def _release(self) -> None:
        """Give back the memory of the connection."""
        while not self._messages.empty():
            if isinstance(message := self._messages.get_nowait(), _Message):
                release_body(message.request)
        self._incoming.complete()
        self._chain.forget()

    def _end(self, end: _End) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._messages.put_nowait(end)

    # --- the reading task ---------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read messages until the connection is closed. A client that answers no pings is cut off."""
        clock = asyncio.get_running_loop().time
        last, missed = clock() + MAX_AGE_S, 0
        while not self._socket.closed:
            if clock() >= last:
                self._end(_End(WSCloseCode.OK, _too_old()))
            try:
                message = await self._socket.receive(self._ping_s)
            except TimeoutError:
                # A process that ends reads no more of its connections.
                if self._process.draining or self._request.protocol.writing_paused:
                    continue
                if (missed := missed + 1) > MAX_MISSED:
                    self._abort()
                    return
                await self._send(self._socket.ping())
                continue
            missed = 0
            if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                await self._accept(message)
            elif message.type is WSMsgType.PING:
                await self._send(self._socket.pong(message.data))
            elif message.type is not WSMsgType.PONG:
                return

    async def _accept(self, message: WSMessage) -> None:
        """Put a message in the line of those that are served, once there is memory for it."""
        self._incoming.complete()
        if self._is_ending:
            return
        if self._messages.qsize() >= MAX_WAITING:
            await self._close(WSCloseCode.POLICY_VIOLATION, f"More than {MAX_WAITING} messages wait.")
            return
        headers = CIMultiDict(
            (name, value)
            for name, value in self._request.headers.items()
            if name.title() not in _DROPPED and not name.lower().startswith(_WEBSOCKET)
        )
        request = self._request.clone(method=hdrs.METH_POST, headers=headers)
        data: bytes | ApiError = message.data
        if message.type is WSMsgType.BINARY:
            data = InvalidRequest("A message must be text: the JSON of an event.", code="invalid_json")
        else:
            try:
                await hold_body(request, len(message.data), self._body_timeout_s)
            except ApiError as error:
                data = error
        self._messages.put_nowait(_Message(request, data))

    # --- the serving task ---------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serve the messages, one after the other, and close the connection."""
        try:
            while isinstance(message := await self._messages.get(), _Message):
                self._is_serving = True
                await self._serve_message(message)
                self._is_serving = False
            if message.error:
                await self._send(self._socket.send_str(message.error))
            await self._close(message.code)
        except ConnectionError:
            self._abort()
        except Exception:
            log.exception("a WebSocket failed unexpectedly")
            await self._close(WSCloseCode.INTERNAL_ERROR)

    async def _serve_message(self, message: _Message) -> None:
        request, wire = message.request, SocketEvents(self._chain.end)
        given = self._body(message.data)
        request[BODY], request[WIRE], request[CHAIN] = given, wire, self._chain
        previous = given.get("previous_response_id") if isinstance(given, dict) else None
        del message, given  # the handler drops the body before the answer is written
        try:
            response = await request.app._handle(request)
        except ConnectionError:
            if (transport := request.transport) is None or transport.is_closing():
                raise
            # The middleware of errors has logged an unexpected error.
            response = web.json_response({"error": {"type": "server_error", "code": "internal"}}, status=500)
        await self._chain.settle()
        if response.status < 400 or wire.has_begun:
            return
        if type(previous) is str and self._chain.knows(previous):
            self._chain.forget()
        await self._send(self._socket.send_str(_refusal(request, response)))
        if response.status == 401:
            self._end(_End(WSCloseCode.POLICY_VIOLATION))

    def _body(self, data: bytes | ApiError) -> dict[str, Any] | ApiError:
        """Return the body of the request of a message, or the error with which it is refused."""
        try:
            if self._process.draining:
                raise ShuttingDown("This gateway is shutting down; connect again and send the message again.")
            if isinstance(data, ApiError):
                raise data
            body = _body_of(parse_object(data, max_values(self._max_bytes)))
            self._chain.is_warm_up = _is_warm_up(body)
            return body
        except ApiError as error:
            return error.with_traceback(None)

    # --- the connection -----------------------------------------------------------------------------------------------

    async def _send(self, written: Awaitable[Any]) -> None:
        """Wait for a slow client, for the write timeout at most. Raises ConnectionError."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await written
        except TimeoutError:
            self._process.meters.client_stalled()
            self._abort()
            raise ConnectionResetError(f"the client has not read for {self._write_timeout_s:g} s") from None

    async def _close(self, code: int, reason: str = "") -> None:
        with suppress(ConnectionError):
            await self._send(self._socket.close(code=code, message=reason.encode()[:120]))

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _body_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a POST that a message stands for. Raises InvalidRequest."""
    kind = message.pop("type", None)
    if kind != "response.create":
        raise refused("type", f"type must be 'response.create', not {shown(kind)}.")
    if message.get("stream_id") is not None:
        raise refused("stream_id", "stream_id is not supported: a connection has one response at a time; leave it out.")
    for name, (value, reason) in _FIXED.items():
        if message.pop(name, None) not in (None, value):
            raise refused(name, f"{name} cannot be {json.dumps(not value)}: {reason}; leave it out.")
    message.pop("stream_id", None)
    return {**message, "stream": True}


def _is_warm_up(body: dict[str, Any]) -> bool:
    """Take `generate` out of a body; return True if it is false. Raises InvalidRequest."""
    generate = body.pop("generate", None)
    if generate is not None and type(generate) is not bool:
        raise refused("generate", f"generate must be true or false, not {shown(generate)}.")
    return generate is False


def _refusal(request: web.Request, response: web.StreamResponse) -> str:
    """Return the event of an error, with the headers that its HTTP response would have."""
    assert isinstance(response, web.Response)
    add_request_headers(request, response)
    headers = {name.lower(): value for name, value in response.headers.items() if not name.startswith("Content-")}
    error = {"message": "Internal error.", "param": None, **json.loads(response.text or "")["error"]}
    return error_event(response.status, error, headers=headers)


def _too_old() -> str:
    error = InvalidRequest(
        f"The connection is {MAX_AGE_S / 60:g} minutes old; open another one.",
        code="websocket_connection_limit_reached",
    )
    return error_event(error.status, json.loads(body(error))["error"])
