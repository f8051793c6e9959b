"""The gateway as one object: its parts, and the way of a call through them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from aiohttp import web

from gateway import answers, chat, completions, sse
from gateway.answers import ANSWER, Answer
from gateway.calls import Call, Limits
from gateway.errors import REQUEST_ID
from gateway.fleet import Fleet
from gateway.model import ServedModel
from gateway.parsing import read_object
from gateway.rendering import Renderer
from gateway.settings import GatewaySettings
from gateway.streams import Fanout
from gateway.submission import Submission
from gateway.subscription import Subscription
from shared.broker import Broker, QueueBounds, new_id
from shared.redis_clients import command_client, pubsub_client

log = logging.getLogger("gateway")

# How long cancellations may take when the gateway ends.
CANCEL_TIMEOUT_S = 3.0

Reader = Callable[[dict[str, Any], Limits, Renderer], Awaitable[Call]]


class Gateway:
    """Everything that handlers need. Between `start` and `close` it holds connections, tasks and threads."""

    def __init__(self, settings: GatewaySettings, model: ServedModel) -> None:
        self.settings = settings
        self.model = model
        self.id = settings.gateway_id or new_id()
        self.started = answers.created()
        self.draining = False

    async def start(self) -> None:
        settings = self.settings
        self._commands = command_client(settings.redis_url)
        self._pubsub = pubsub_client(settings.redis_url)
        self.broker = Broker(self._commands, self.model.name)
        self.renderer = Renderer(self.model, settings.tokenizer_threads)
        self.fleet = Fleet(self.broker, self.id, self.model, settings.max_model_len)
        self.fanout = Fanout(self.broker, settings.keepalive_s)
        self.subscription = Subscription(self._pubsub, self.broker.keys.channel(self.id), self.fanout)
        bounds = QueueBounds(settings.max_queued_requests, settings.max_queued_tokens)
        self.submission = Submission(self.broker, self.id, bounds, self.subscription.ready)
        self.subscription.start()
        await self.fleet.start()

    async def close(self) -> None:
        await self.submission.canceller.close(CANCEL_TIMEOUT_S)
        await self.subscription.close()
        await self.fleet.close()
        self.renderer.close()
        await self._pubsub.aclose()
        await self._commands.aclose()

    @property
    def limits(self) -> Limits:
        settings = self.settings
        return Limits(
            model=self.model.name,
            max_model_len=self.fleet.max_model_len,
            max_num_seqs=self.fleet.max_num_seqs,
            vocab_size=self.fleet.vocab_size,
            max_n=settings.max_n,
            max_prompts=settings.max_prompts,
            max_choices=settings.max_choices,
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._serve(request, chat.read, chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._serve(request, completions.read, completions)

    async def _serve(self, request: web.Request, read: Reader, dialect: ModuleType) -> web.StreamResponse:
        body = await read_object(request, self.settings.max_body_bytes, self.settings.body_timeout_s)
        call = await read(body, self.limits, self.renderer)
        call_id = request[REQUEST_ID]
        requests = call.requests(call_id)
        options = call.options
        mark = sse.mark_for(request.headers)
        form = dialect.Format(call_id, self.model.name, answers.created(), call.choices, options.include_usage, mark)
        outputs = self.fanout.open([item.id for item in requests])
        answer = Answer(call, self.model, outputs)
        request[ANSWER] = answer
        try:
            await self.submission.submit(requests)
            outputs.accepted = True
            if options.stream:
                return await answers.stream(request, answer, form, self.settings.write_timeout_s)
            return await answers.collect(answer, form)
        finally:
            self.fanout.close(outputs)
            if outputs.accepted:
                # Nobody waits for what has not ended by now: the client has left, or another prompt failed.
                self.submission.canceller.cancel(outputs.unfinished)
                self._count_ends(answer)

    def _count_ends(self, answer: Answer) -> None:
        for _ in range(len(answer.outputs.cursors) - len(answer.outputs.unfinished)):
            self.submission.rate.count()

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models"""
        return web.json_response({"object": "list", "data": [self._card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{name}"""
        self.limits.check_model(request.match_info["name"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.started,
            "owned_by": "quire",
            "max_model_len": self.fleet.max_model_len,
        }

    async def healthz(self, request: web.Request) -> web.Response:
        """GET /healthz: the process is alive."""
        return web.json_response({"status": "ok"})

    async def readyz(self, request: web.Request) -> web.Response:
        """GET /readyz: a request that comes now would be worked on."""
        workers = len(self.fleet.workers)
        problems = [
            *(["this gateway is shutting down"] if self.draining else []),
            *([] if self.fleet.redis_answers else ["Redis does not answer"]),
            *([] if self.subscription.ready.is_set() else ["not subscribed to the workers' output"]),
            *([] if workers or not self.fleet.redis_answers else ["no worker makes progress"]),
        ]
        state = {"ready": not problems, "workers": workers, "problems": problems}
        return web.json_response(state, status=503 if problems else 200)

    async def drain(self, app: web.Application) -> None:
        """From now on not ready; open calls go on."""
        self.draining = True
        # Let the loop close listening sockets and answer what is on its way.
        await asyncio.sleep(0)
