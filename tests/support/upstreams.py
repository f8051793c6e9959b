"""A server of another engine, as far as a worker with `--upstream` calls one: real HTTP, a model that is a function.

The next token depends on all tokens before it, so an answer that is continued after a break has the same text, and a
prompt that differs in one token another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

MODEL = "tiny"
# Characters that the function draws, one of them of several tokens. None of them ends an answer.
ALPHABET = "abcdefgh é"


def next_token(context: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the token after a context: the second half of a character, or one of ALPHABET."""
    first, second = tokenizer.encode("é", add_special_tokens=False).ids
    if context[-1] == first:
        return int(second)
    digest = hashlib.blake2b(repr(list(context)).encode(), digest_size=4).digest()
    pieces: list[int] = [tokenizer.encode(one, add_special_tokens=False).ids[0] for one in ALPHABET]
    return pieces[int.from_bytes(digest, "big") % len(pieces)]


def answer(prompt: Sequence[int], count: int, tokenizer: Tokenizer) -> list[int]:
    """Return the whole answer to a prompt."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, tokenizer))
    return context[len(prompt) :]


@dataclass
class Fault:
    """What goes wrong with one request: `kind` after this many tokens."""

    kind: str
    after: int = 0


@dataclass
class FakeUpstream:
    """The state of a server. kind: `vllm`, `ids` (text comes back), `text` or `llamacpp`.

    faults: of the next requests, one each. bodies: of all requests for a stream. closed: streams that clients left.
    holds_after: each stream stops after this many tokens, until `go_on` is set.
    """

    tokenizer: Tokenizer
    kind: str = "vllm"
    key: str = ""
    pause_s: float = 0.0
    holds_after: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    adds_bos: bool = False
    owner: str = "vllm"
    port: int = 0
    faults: deque[Fault] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    closed: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        if self.kind == "llamacpp":
            app.router.add_get("/props", self._props)
            app.router.add_post("/completion", self._native)
        return app

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeUpstream]:
        """Serve on a port, the same one each time."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": f"wrong key, not {self.key}"}}, status=401)
        return None

    async def _models(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        entry = {"id": MODEL, "object": "model", "owned_by": self.owner, "max_model_len": 200}
        return web.json_response({"object": "list", "data": [entry]})

    async def _props(self, request: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": 150}})

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=False).ids
            return [0] * self.adds_bos + ids
        if self.kind == "text":
            raise web.HTTPBadRequest(
                text=json.dumps({"error": {"message": "prompt must be a string"}}), content_type="application/json"
            )
        return list(prompt)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        prompt = self._ids(body["prompt"])
        context = prompt[self.adds_bos :] if isinstance(body["prompt"], str) else prompt
        with_ids = self.kind == "vllm" and body.get("return_token_ids")
        if not body.get("stream"):
            ids = answer(context, body["max_tokens"], self.tokenizer)
            choice = {"index": 0, "text": self.tokenizer.decode(ids), "finish_reason": "length"}
            choice |= {"token_ids": ids} if with_ids else {}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
            return web.json_response({"object": "text_completion", "choices": [choice], "usage": usage})

        def event(ids: list[int], text: str, reason: str | None) -> dict[str, Any]:
            choice = {"index": 0, "text": text, "finish_reason": reason} | ({"token_ids": ids} if with_ids else {})
            return {"object": "text_completion", "choices": [choice]}

        return await self._stream(request, body, context, body["max_tokens"], event)

    async def _native(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"content": "", "tokens": answer(body["prompt"], 1, self.tokenizer)})

        def event(ids: list[int], text: str, reason: str | None) -> dict[str, Any]:
            # The ids of a character of several tokens are lost, but for the last one.
            ends = {"stop": True, "stop_type": "limit", "tokens": []} if reason else {"stop": False}
            return {"content": text, "tokens": ids[-1:]} | ends

        return await self._stream(request, body, self._ids(body["prompt"]), body["n_predict"], event)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], context: list[int], count: int, event: Any
    ) -> web.StreamResponse:
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.popleft() if self.faults else Fault("none", -1)
        if fault.kind.isdecimal():
            return web.json_response({"error": {"message": "says the upstream"}}, status=int(fault.kind))
        if fault.kind == "redirect":
            raise web.HTTPTemporaryRedirect(f"{self.url}/elsewhere")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        try:
            held: list[int] = []
            ids = answer(context, count, self.tokenizer)
            for number, token in enumerate(ids):
                if number == fault.after:
                    await self._break(fault.kind, request, response)
                    if fault.kind == "end":
                        return response
                if number == self.holds_after:
                    await self.go_on.wait()
                held.append(token)
                text = self.tokenizer.decode(held)
                is_half = text.endswith("\ufffd") and number < len(ids) - 1
                if self.kind != "vllm" and is_half:
                    continue
                await self._send(response, event(held, "" if is_half else text, None))
                held = [] if not is_half or self.kind == "vllm" else held
                await asyncio.sleep(self.pause_s)
            await self._send(response, event([], "", "length"))
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.closed += 1
            raise
        finally:
            self.open -= 1
        return response

    async def _send(self, response: web.StreamResponse, data: dict[str, Any]) -> None:
        await response.write(f": a comment\n\nid: 7\ndata: {json.dumps(data)}\n\n".encode())

    async def _break(self, kind: str, request: web.Request, response: web.StreamResponse) -> None:
        match kind:
            case "cut":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(10)
            case "error":
                await self._send(response, {"error": {"message": "the engine died", "code": 500}})
                await asyncio.sleep(10)
            case "refusal":
                await self._send(response, {"error": {"message": "not this prompt", "code": 400}})
            case "line":
                await response.write(b"data: " + b"x" * (2 << 20) + b"\n\n")
            case "silence":
                await asyncio.sleep(10)
            case "comments":
                for _ in range(200):
                    await response.write(b": still there\n\n")
                    await asyncio.sleep(0.05)
            case "json":
                await response.write(b"data: {no\n\n")
            case "ids":
                await self._send(response, {"choices": [{"text": "x", "token_ids": [999_999], "finish_reason": None}]})
            case "reason":
                await self._send(response, {"choices": [{"text": "", "token_ids": [], "finish_reason": "abort"}]})
