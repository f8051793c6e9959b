"""The gateway as one object: its parts, and the way of a call through them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from quire.gateway.admin.metrics import GatewayMetrics
from quire.gateway.admin.request_meter import BEGAN, METER, RequestMeters
from quire.gateway.admin.tracing import SPAN
from quire.gateway.admission.admission_options import read_admission_options
from quire.gateway.admission.retry import RetryPolicy, down
from quire.gateway.admission.submission import Submission
from quire.gateway.admission.worker_registry import WorkerRegistry
from quire.gateway.api import chat, completions, resume
from quire.gateway.api.call import Call, request_id
from quire.gateway.api.errors import REQUEST_ID, BrokerDown
from quire.gateway.api.parsing import read_object
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.resume import StoredCall
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.settings import GatewaySettings
from quire.gateway.stream import sse, transcript
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.events import Events
from quire.gateway.stream.router import FrameRouter
from quire.gateway.stream.subscription import Subscription
from quire.gateway.stream.transcript import ANSWER, Transcript
from quire.gateway.stream.writer import StreamWriter, send_whole
from quire.shared.broker import Broker, QueueBounds, new_id
from quire.shared.messages import MessageError
from quire.shared.redis.clients import command_client, pubsub_client
from quire.shared.telemetry.loop_lag import LoopLag

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

log = logging.getLogger("gateway")

# How long cancellations may take when the gateway ends.
CANCEL_TIMEOUT_S = 3.0
# How much of a prompt the log has where it is asked for.
MAX_LOGGED_PROMPT = 4096

Reader = Callable[[dict[str, Any], RequestLimits, Renderer], Awaitable[Call]]
FormatClass = type[chat.ChatDialect] | type[completions.CompletionDialect]


class Gateway:
    """Everything that handlers need. Between `start` and `close` it holds connections, tasks and threads."""

    def __init__(self, settings: GatewaySettings, model: ServedModel, tracer: Tracer | None = None) -> None:
        self.settings = settings
        self.tracer = tracer
        self.model = model
        self.id = settings.gateway_id or new_id()
        self.started = transcript.created()
        self.draining = False
        self.meters = RequestMeters()

    async def start(self) -> None:
        settings = self.settings
        self._commands = command_client(settings.redis_url, self.model.name)
        self._pubsub = pubsub_client(settings.redis_url, self.model.name)
        self.broker = Broker(self._commands, self.model.name)
        self.renderer = Renderer(self.model, settings.tokenizer_threads)
        self.fanout = FrameRouter(self.broker, settings.keepalive_s)
        self.fleet = WorkerRegistry(self.broker, self.id, self.model, settings.max_model_len, self.fanout)
        self.subscription = Subscription(self._pubsub, self.broker.keys.channel(self.id), self.fanout)
        bounds = QueueBounds(settings.max_queued_requests, settings.max_queued_tokens)
        self.patience = RetryPolicy(self.subscription)
        self.submission = Submission(self.broker, self.id, bounds, self.fleet, self.patience, self.fanout.has)
        self._lag = LoopLag()
        self.metrics = GatewayMetrics(
            self.broker,
            self.meters,
            self.fleet,
            self.fanout,
            self.subscription,
            self.submission.canceller,
            self._lag,
        )
        self._lag.start()
        self.fanout.watch.start()
        self.subscription.start()
        await self.fleet.start()

    async def close(self) -> None:
        await self._lag.close()
        await self.submission.canceller.close(CANCEL_TIMEOUT_S)
        await self.subscription.close()
        await self.fanout.watch.close()
        await self.fleet.close()
        self.renderer.close()
        await self._pubsub.aclose()
        await self._commands.aclose()

    @property
    def limits(self) -> RequestLimits:
        settings = self.settings
        return RequestLimits(
            model=self.model.name,
            max_model_len=self.fleet.max_model_len,
            max_num_seqs=self.fleet.max_num_seqs,
            vocab_size=self.fleet.vocab_size,
            max_n=settings.max_n,
            max_prompts=settings.max_prompts,
            max_choices=settings.max_choices,
            special_tokens=self.model.special_tokens,
            sampling_defaults=self.model.sampling_defaults,
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._serve(request, chat.read, chat.ChatDialect)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._serve(request, completions.read, completions.CompletionDialect)

    async def resume_chat(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/chat/completions/{id}/stream"""
        return await self._resume(request, chat.ChatDialect)

    async def resume_completion(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/completions/{id}/stream"""
        return await self._resume(request, completions.CompletionDialect)

    async def cancel_chat(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions/{id}/cancel"""
        return await self._cancel(request, chat.ChatDialect)

    async def cancel_completion(self, request: web.Request) -> web.Response:
        """POST /v1/completions/{id}/cancel"""
        return await self._cancel(request, completions.CompletionDialect)

    async def _serve(self, request: web.Request, read: Reader, format_: FormatClass) -> web.StreamResponse:
        settings = self.settings
        meter = request[METER] = self.meters.open(format_.dialect, "new", request[BEGAN])
        body = await read_object(request, settings.max_body_bytes, settings.body_timeout_s)
        if settings.log_prompts:
            _log_prompt(request[REQUEST_ID], body)
        call = await read(body, self.limits, self.renderer)
        terms = read_admission_options(
            request.headers, request.path, body, call.options, settings.default_timeout_s, settings.max_timeout_s
        )
        if (span := request.get(SPAN)) is not None:
            span.asks(format_.dialect, call)
            terms = replace(terms, traceparent=str(span.context))
        call_id = request[REQUEST_ID]
        requests = call.requests(call_id)
        about = call.metadata(format_.dialect, transcript.created())
        can_return = bool(terms.idempotency_key) or (call.options.stream and len(requests) == 1)
        with self._listening([item.id for item in requests], can_return=can_return) as outputs:
            first = await self.submission.submit(requests, about.encode(), terms)
            if first == call_id:
                meter.accepted(about.prompt_tokens)
                outputs.accept(terms.deadline_ms / 1000 or None, is_logged=False)
                outputs.is_responsible = not terms.is_background
                answer = Transcript(about, self.model, outputs)
                return await self._answer(request, answer, format_(call_id, self.model, about), call.options.stream)
        # The idempotency key was used before: this is the answer to that call.
        meter.kind = "joined"
        ids = [request_id(first, index) for index in range(len(requests))]
        with self._listening(ids) as outputs:
            # All but the first may have been submitted, or listened to, for this call.
            outputs.is_responsible = not terms.is_background
            known = await self._look_up(ids, format_.dialect)
            if known is None or not await self._attach(outputs, known):
                raise down(f"request {first} of an idempotency key is gone")
            request[REQUEST_ID] = first
            answer = Transcript(known.about, self.model, outputs, is_joined=True)
            return await self._answer(request, answer, format_(first, self.model, known.about), call.options.stream)

    async def _answer(
        self, request: web.Request, answer: Transcript, form: transcript.Dialect, is_stream: bool
    ) -> web.StreamResponse:
        request[ANSWER] = answer
        if not is_stream:
            choices = await transcript.collect(answer)
            request[METER].collected(answer.tokens)
            return await send_whole(request, form.full(choices, answer.usage), self.settings.write_timeout_s)
        events = Events(answer, form, sse.takes_ids(request.headers))
        return await StreamWriter(request, answer, events, self.settings.write_timeout_s).run(events.opening())

    async def _resume(self, request: web.Request, format_: FormatClass) -> web.StreamResponse:
        meter = request[METER] = self.meters.open(format_.dialect, "resumed", request[BEGAN])
        after = resume.read_event_id(request)
        meter.tokens = after.tokens
        call_id = resume.read_call_id(request.match_info["id"], format_.prefix)
        await self.patience.check_subscribed()
        with self._listening([call_id]) as outputs:
            known = await self._look_up([call_id], format_.dialect)
            if known is None:
                raise resume.not_found()
            answer = Transcript(known.about, self.model, outputs, is_joined=True)
            form = format_(call_id, self.model, known.about)
            events = Events(answer, form, sse.takes_ids(request.headers), after)
            outputs.accept(known.left_s, is_logged=True)
            # While it reads it may outlast all who listened here. What is another gateway's is not cancelled.
            outputs.is_responsible = not known.about.is_background
            beginning = await resume.catch_up(answer, events, after, known)
            # Only now, for to attach is to take the output away from another gateway, and to answer for the request.
            if not await self._attach(outputs, known):
                raise resume.not_found()
            request[REQUEST_ID] = call_id
            request[ANSWER] = answer
            return await StreamWriter(request, answer, events, self.settings.write_timeout_s).run(beginning)

    async def _cancel(self, request: web.Request, format_: FormatClass) -> web.Response:
        """End a call that runs, also one that runs in the background. Of one that has ended nothing changes."""
        call_id = resume.read_call_id(request.match_info["id"], format_.prefix)
        try:
            known = await self.patience(partial(resume.look_up, self.broker, call_id))
            if known is None or known.about.dialect != format_.dialect:
                raise resume.not_found()
            ids = [request_id(call_id, index) for index in range(known.about.requests)]
            found = [await self.patience(partial(self.broker.cancel, id_)) for id_ in ids]
        except MessageError as error:
            self._note_corrupt_about(call_id, error)
            raise resume.not_found() from error
        ran = not known.is_done or "cancelled" in found or "flagged" in found
        return web.json_response({"id": format_.prefix + call_id, "cancelled": ran})

    async def _look_up(self, ids: Sequence[str], dialect: str) -> StoredCall | None:
        """What is known of the call with these requests; None if it is unknown or of another dialect.

        Raises BrokerDown or InvalidRequest.
        """
        try:
            known = await self.patience(partial(resume.look_up, self.broker, ids[0]))
        except MessageError as error:
            self._note_corrupt_about(ids[0], error)
            return None
        if known is None or known.about.dialect != dialect:
            return None
        if known.about.requests != len(ids):
            raise resume.several_prompts(known.about.requests)
        return known

    async def _attach(self, outputs: OutputBuffer, known: StoredCall) -> bool:
        """Have the requests of a call published to this gateway from now on; False if they are gone."""
        # Even if the client leaves while Redis is asked, which may have put this gateway down as listening by then.
        outputs.is_responsible = not known.about.is_background
        try:
            attachments = [await self.patience(partial(self.broker.attach, id_, self.id)) for id_ in outputs.cursors]
        except BrokerDown:
            outputs.is_responsible = False  # the client will come again
            raise
        if attachments[0] is None:
            return False
        outputs.accept(known.left_s, is_logged=True)
        return True

    def _note_corrupt_about(self, call_id: str, error: MessageError) -> None:
        self.meters.corrupt_abouts += 1
        if self.meters.corrupt_abouts == 1:
            log.error(
                "what is noted about call %s is corrupt (this is said once): %s",
                call_id,
                error,
                extra={"request_id": call_id},
            )

    @contextmanager
    def _listening(self, ids: Sequence[str], can_return: bool = True) -> Iterator[OutputBuffer]:
        """The output of requests, for one HTTP request. What nobody here wants after it is cancelled.

        Unless the gateway is ending, and the client `can_return` to another one for the rest: if it does not, the
        request is an orphan, and its worker cancels it.
        """
        outputs = self.fanout.open(ids)
        try:
            yield outputs
        finally:
            self.fanout.close(outputs)
            canceller = self.submission.canceller
            if not (self.draining and can_return):
                if outputs.is_responsible:
                    # Nobody waits for what has not ended by now: the client has left, or another prompt failed.
                    canceller.cancel(outputs.unfinished)
                canceller.left(id_ for id_ in outputs.cursors if not self.fanout.has(id_))
            canceller.expire(outputs.late)

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
            "sampling_defaults": self.model.sampling_defaults,
        }

    async def healthz(self, request: web.Request) -> web.Response:
        """GET /healthz: the process is alive."""
        return web.json_response({"status": "ok"})

    async def readyz(self, request: web.Request) -> web.Response:
        """GET /readyz: a request that comes now would be worked on."""
        workers = len(self.fleet.workers)
        problems = [
            *(["this gateway is shutting down"] if self.draining else []),
            *self.redis_problems(),
            *([] if workers or not self.fleet.redis_answers else ["no worker makes progress"]),
        ]
        state = {"ready": not problems, "workers": workers, "problems": problems}
        return web.json_response(state, status=503 if problems else 200)

    def redis_problems(self) -> list[str]:
        """Why nothing can be accepted or heard now."""
        return [
            *([] if self.fleet.redis_answers else ["Redis does not answer"]),
            *([] if self.subscription.ready.is_set() else ["not subscribed to the workers' output"]),
        ]

    async def drain(self, app: web.Application) -> None:
        """From now on not ready; open calls go on."""
        self.draining = True
        # Let the loop close listening sockets and answer what is on its way.
        await asyncio.sleep(0)


def _log_prompt(call_id: str, body: dict[str, Any]) -> None:
    """For --log-prompts: what was asked, also where it is refused."""
    asked = {name: body[name] for name in ("messages", "prompt") if name in body}
    prompt = json.dumps(asked)[:MAX_LOGGED_PROMPT]
    log.info("request %s asks: %s", call_id, prompt, extra={"request_id": call_id, "prompt": prompt})
