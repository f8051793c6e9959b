"""A gateway of the page's tests: the real static files, and streams that a test writes event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from quire.gateway.api.chat import ChatDialect
from quire.gateway.features.pages import static_files
from quire.gateway.output.parts import AnswerPart
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.sse import EventId

MODEL = "stub"
SERVED: Any = SimpleNamespace(name=MODEL, token_texts={})
CHAT = "/v1/chat/completions"


class Call:
    """A call of the page that waits for its answer: a POST, or a GET that takes a stream up again."""

    def __init__(self, request: web.Request, body: dict[str, Any] | None) -> None:
        self.request = request
        self.body = body
        self.is_over = asyncio.Event()
        self._response: web.StreamResponse | None = None
        self._refusal: web.Response | None = None  # or another answer without a stream

    @property
    def key(self) -> str | None:
        return self.request.headers.get("Idempotency-Key")

    @property
    def last_event_id(self) -> str | None:
        return self.request.headers.get("Last-Event-ID")

    def refuse(self, status: int, message: str, code: str, **headers: str) -> None:
        """Answer with an error of the API."""
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        self._refusal = web.json_response({"error": error}, status=status, headers=names)
        self.is_over.set()

    def answer(self, body: dict[str, Any]) -> None:
        """Answer a call that streams nothing."""
        self._refusal = web.json_response(body)
        self.is_over.set()

    async def accept(self, request_id: str) -> None:
        self._response = web.StreamResponse(headers={**sse.HEADERS, "x-quire-request-id": request_id})
        await self._response.prepare(self.request)

    async def write(self, text: str) -> None:
        assert self._response is not None
        await self._response.write(text.encode())

    async def end(self) -> None:
        """Close the stream as a server does that has said all."""
        assert self._response is not None
        await self._response.write_eof()
        self.is_over.set()

    def cut(self) -> None:
        """Break the connection off."""
        assert self.request.transport is not None
        self.request.transport.abort()
        self.is_over.set()

    async def result(self) -> web.StreamResponse:
        await self.is_over.wait()
        response = self._refusal or self._response
        assert response is not None
        return response


class Stub:
    """Collects the page's calls for the test to answer."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.url = ""
        # Further fields of the model's entry in /v1/models.
        self.card: dict[str, Any] = {}
        # Entries of further models.
        self.more_models: list[dict[str, Any]] = []
        # What the key of the page has used, by day and model; None without a key.
        self.usage: list[dict[str, Any]] | None = None
        self.status = {"redis": True, "workers": 1, "responding": 1, "silent_s": 0.5}

    async def call(self) -> Call:
        return await asyncio.wait_for(self.calls.get(), 60)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        call = Call(request, await request.json() if request.method == "POST" else None)
        self.calls.put_nowait(call)
        return await call.result()

    async def _cancel(self, request: web.Request) -> web.Response:
        self.cancelled.put_nowait(request.match_info["id"])
        return web.json_response({"cancelled": True})

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": MODEL, "max_model_len": 512, **self.card}, *self.more_models]
        return web.json_response({"object": "list", "data": cards})

    async def _usage(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.usage}, status=401 if self.usage is None else 200)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self.status)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Stub]:
        app = web.Application()
        app.add_routes(
            [
                *static_files.routes(),
                web.post(CHAT, self._chat),
                web.get(CHAT + "/{id}/stream", self._chat),
                web.post(CHAT + "/{id}/fork", self._chat),
                web.post(CHAT + "/{id}/cancel", self._cancel),
                web.get("/v1/usage", self._usage),
                web.get("/v1/models", self._models),
                web.get("/status", self._status),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


class Script:
    """The events of an answer, as the gateway writes them."""

    def __init__(self, request_id: str = "ab" * 16, n: int = 1) -> None:
        self.request_id = request_id
        metadata = CallMetadata("chat", 1, n, True, (), 5, 1, True)
        self._form = ChatDialect().form(request_id, SERVED, metadata)
        self._n = n

    @property
    def call_id(self) -> str:
        return ChatDialect.prefix + self.request_id

    def opening(self) -> str:
        events = self._form.opening({})
        return "".join(f"id: {EventId(0, index + 1)}\n{event}" for index, event in enumerate(events))

    def text(self, position: int, text: str, choice: int = 0) -> str:
        return f"id: {position}\n{self._form.text(choice, text)}"

    def parts(self, position: int, *parts: AnswerPart) -> str:
        """Reasoning and tool calls."""
        events = self._form.parts(0, parts)
        return "".join(f"id: {EventId(position, step)}\n{event}" for step, event in enumerate(events))

    def texts(self, pieces: Sequence[str], first: int = 1) -> str:
        return "".join(self.text(first + index, piece) for index, piece in enumerate(pieces))

    def end(self, position: int, reason: str = "stop") -> str:
        finishes = [event for choice in range(self._n) for event in self._form.finish(choice, reason)]
        usage = {"prompt_tokens": 5, "completion_tokens": position, "total_tokens": 5 + position}
        events = [*finishes, *self._form.ending(usage)]
        return "".join(f"id: {EventId(position, step)}\n{event}" for step, event in enumerate(events, start=1))

    def error(self, position: int, message: str, code: str) -> str:
        body = {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
        return f"id: {EventId(position, 1)}\n{sse.event(json.dumps(body))}"

    async def play(self, call: Call, pieces: Sequence[str]) -> None:
        """The whole answer at once."""
        await call.accept(self.request_id)
        await call.write(self.opening() + self.texts(pieces) + self.end(len(pieces)))
        await call.end()
