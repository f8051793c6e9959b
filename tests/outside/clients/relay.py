"""Relays between a client and the server under test: they keep each request, and may change one on its way.

The demo model calls no tool by itself, and agents leave the choice to the model: a test forces a call by a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

# Headers that belong to one connection, or to the length of a body that may change.
OWN = {"connection", "content-length", "host", "transfer-encoding", "upgrade"}
PIECE = 65_536


@dataclass
class Exchange:
    """A request as the client sent it, and the answer. body: None without JSON."""

    path: str
    body: Any
    status: int = 0
    answer: str = ""


class Exchanges:
    """What a relay keeps. url: of the relay.

    change: called with each request whose body is a JSON object; changes the body in place.
    """

    url: str

    def __init__(self, change: Callable[[Exchange], None] = lambda exchange: None) -> None:
        self.exchanges: list[Exchange] = []
        self.change = change

    def take(self, path: str, data: bytes) -> bytes:
        """Keep a request; return its body, perhaps changed."""
        body = json.loads(data) if data else None
        exchange = Exchange(path, json.loads(data) if data else None)
        self.exchanges.append(exchange)
        if not isinstance(body, dict):
            return data
        sent = Exchange(path, body)
        self.change(sent)
        return json.dumps(sent.body).encode()

    def calls(self, path: str) -> list[Exchange]:
        """The requests of a path, without its query."""
        return [one for one in self.exchanges if one.path.partition("?")[0] == path]


class Relay(Exchanges):
    """Relays HTTP to one server while it is entered."""

    def __init__(self, target: str, change: Callable[[Exchange], None] = lambda exchange: None) -> None:
        super().__init__(change)
        address = urlsplit(target).netloc
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):  # the client left before the end of its answer
                    self._relay()

            do_POST = do_HEAD = do_GET

            def _relay(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                data = relay.take(self.path, self.rfile.read(length))
                exchange = relay.exchanges[-1]
                headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN}
                connection = http.client.HTTPConnection(address, timeout=300)
                connection.request(self.command, self.path, data, headers)
                reply = connection.getresponse()
                exchange.status = reply.status
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in OWN:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                answer = b""
                while piece := reply.read1(PIECE):
                    answer += piece
                    self.wfile.write(piece)
                exchange.answer = answer.decode()
                connection.close()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Relay:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


class SocketRelay(Exchanges):
    """Relays WebSockets to one server while it is entered.

    A message of the client is an exchange, whose answer is the last event. Its status is 0 until a response has ended.
    """

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=1)

    async def _start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        names = [name for name in request.headers if name.lower() not in OWN and not name.lower().startswith("sec-")]
        headers = {name: request.headers[name] for name in names}
        client = web.WebSocketResponse(max_msg_size=0)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(self._target + request.path_qs, headers=headers, max_msg_size=0) as server,
        ):
            await client.prepare(request)
            asked: list[Exchange] = []
            answers = asyncio.create_task(self._answer(client, server, asked))
            async for message in client:
                data = self.take(request.path, message.data.encode())
                asked.append(self.exchanges[-1])
                await server.send_str(data.decode())
            answers.cancel()
        return client

    async def _answer(
        self, client: web.WebSocketResponse, server: aiohttp.ClientWebSocketResponse, asked: list[Exchange]
    ) -> None:
        async for message in server:
            event = message.json()
            asked[-1].answer = message.data
            if event["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
                asked[-1].status = event.get("status", 200)
            await client.send_str(message.data)
        await client.close()

    def _run(self, task: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(task, self._loop).result(60)

    def __enter__(self) -> SocketRelay:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
