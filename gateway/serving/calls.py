"""The verbs of a call: `serve` a new one, `resume` the stream of one, `cancel`, `park` or `unpark` one."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web

from quire.gateway.admission.admission_options import read_admission_options
from quire.gateway.admission.retry import down
from quire.gateway.api import resume as stored
from quire.gateway.api.body_budget import release_body
from quire.gateway.api.call import Call
from quire.gateway.api.caller import caller_of
from quire.gateway.api.parsing import BODY, read_object
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.resume import StoredCall
from quire.gateway.errors.api_errors import REQUEST_ID, USER_HASH, BrokerDown
from quire.gateway.features.tracing.http_span import SPAN
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.serving.service import Gateway
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import CallMetadata, request_id
from quire.gateway.stream.transcript import TRANSCRIPT, Transcript
from quire.gateway.stream.writer import AnswerFormat, EventRenderer, StreamWriter, collect, write_body
from quire.gateway.telemetry.request_meter import BEGAN, METER
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.states import CancelReply

log = logging.getLogger("gateway")

# Characters of a prompt that are logged with --log-prompts.
MAX_LOGGED_PROMPT = 4096


C_co = TypeVar("C_co", bound=Call, covariant=True)
C_contra = TypeVar("C_contra", bound=Call, contravariant=True)
C = TypeVar("C", bound=Call)


class CallReader(Protocol[C_co]):
    """How an API reads its calls. name: in the metadata of its calls, in metrics and in logs."""

    @property
    def name(self) -> str: ...

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> C_co:
        """Checks and tokenizes a call. Raises ApiError."""
        ...


class AnswerWriter(Protocol[C_contra]):
    """Writes the answer to an accepted call. The id of the call is `request[REQUEST_ID]`."""

    async def __call__(
        self, gateway: Gateway, request: web.Request, buffer: OutputBuffer, transcript: Transcript, call: C_contra
    ) -> web.StreamResponse: ...


class Dialect(CallReader[Call], Protocol):
    """One of the APIs: how it reads calls, and how it writes answers. prefix: of the ids that clients see."""

    @property
    def prefix(self) -> str: ...

    def form(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> AnswerFormat:
        """Returns the renderer of the answer to one call."""
        ...


async def serve(gateway: Gateway, dialect: Dialect, request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions, /v1/completions, /v1/messages: generates an answer."""
    return await serve_with(gateway, dialect, request, partial(_write_answer, dialect))


async def _write_answer(
    dialect: Dialect,
    gateway: Gateway,
    request: web.Request,
    buffer: OutputBuffer,
    transcript: Transcript,
    call: Call,
) -> web.StreamResponse:
    """Writes the answer as events or as one body."""
    form = dialect.form(request[REQUEST_ID], gateway.model, transcript.metadata)
    meter, write_timeout_s = request[METER], gateway.settings.write_timeout_s
    request[TRANSCRIPT] = transcript
    if not call.options.stream:
        choices = await collect(buffer, transcript)
        meter.collected(transcript.tokens)
        return await write_body(request, form.full(choices, transcript.usage), meter, write_timeout_s)
    events = EventRenderer(transcript, form, request.headers)
    return await StreamWriter(request, buffer, transcript, events, meter, write_timeout_s).run(events.opening())


async def serve_with(
    gateway: Gateway, dialect: CallReader[C], request: web.Request, write: AnswerWriter[C]
) -> web.StreamResponse:
    """Reads and submits a call, or attaches to the earlier one of its idempotency key; `write` writes the answer."""
    settings = gateway.settings
    meter = request[METER] = gateway.meters.open(dialect.name, "new", request[BEGAN])
    # 1) Read the call: parse, check and tokenize it.
    body = await read_object(request, settings.max_body_bytes, settings.body_timeout_s)
    if settings.log_prompts:
        _log_prompt(request[REQUEST_ID], body)
    call = await dialect.read(body, gateway.limits, gateway.renderer)
    caller = caller_of(request)
    call = gateway.key_limits.restricted(caller, call, body)
    call.options.labels.note(request, gateway.user_hash_key)
    options = read_admission_options(
        request.headers, request.path, body, call.options, settings.default_timeout_s, settings.max_timeout_s
    )
    options = replace(
        options,
        retention_s=call.retention_s,
        conversation=call.conversation,
    )
    options = gateway.key_limits.charged(caller, call.options.model, options, request.get(USER_HASH, ""))
    if (span := request.get(SPAN)) is not None:
        span.asks(dialect.name, call)
        options = replace(options, traceparent=str(span.context))
    call_id = request[REQUEST_ID]
    requests = call.requests(call_id)
    metadata = call.metadata(dialect.name, int(time.time()))
    # The body is not needed while the answer is written.
    del body
    request.pop(BODY, None)
    release_body(request)
    # 2) Listen before the requests are submitted, so that no frame is missed.
    can_return = bool(options.idempotency_key) or (call.options.stream and len(requests) == 1)
    with gateway.listening([item.id for item in requests], can_return, caller.owner) as buffer:
        # 3) Submit a request for each prompt.
        first = await gateway.submission.submit(requests, metadata.encode(), options)
        gateway.key_limits.tell(request, options.charge)
        if first == call_id:
            meter.accepted(metadata.prompt_tokens)
            buffer.accept(options.deadline_ms / 1000 or None, is_logged=False)
            buffer.is_responsible = not options.is_background
            # 4) Answer.
            transcript = Transcript(metadata, gateway.model, buffer.cursors)
            return await write(gateway, request, buffer, transcript, call)
    # The idempotency key stands for an earlier call. 3) Attach to the requests of that call.
    meter.kind = "joined"
    ids = [request_id(first, index) for index in range(len(requests))]
    with gateway.listening(ids, owner=caller.owner) as buffer:
        # The submission may have added requests that the earlier call lacked, or listeners to its requests.
        buffer.is_responsible = not options.is_background
        known = await _look_up(gateway, ids, dialect.name, caller.owner)
        if known is None or not await attach(gateway, buffer, known):
            raise down(f"request {first} of an idempotency key is gone")
        request[REQUEST_ID] = first
        # 4) Answer.
        transcript = Transcript(known.metadata, gateway.model, buffer.cursors, is_joined=True)
        return await write(gateway, request, buffer, transcript, call)


async def resume(gateway: Gateway, dialect: Dialect, request: web.Request) -> web.StreamResponse:
    """GET /v1/chat/completions/{id}/stream, /v1/completions/{id}/stream: goes on after the client's last event."""
    meter = request[METER] = gateway.meters.open(dialect.name, "resumed", request[BEGAN])
    # 1) Read which event the client has.
    after = stored.read_event_id(request)
    meter.tokens = after.tokens
    call_id = stored.read_call_id(request.match_info["id"], dialect.prefix)
    await gateway.retry.check_subscribed()
    with gateway.listening([call_id], owner=caller_of(request).owner) as buffer:
        # 2) Find the call in Redis.
        known = await _look_up(gateway, [call_id], dialect.name, caller_of(request).owner)
        if known is None:
            raise stored.not_found()
        transcript = Transcript(known.metadata, gateway.model, buffer.cursors, is_joined=True)
        form = dialect.form(call_id, gateway.model, known.metadata)
        events = EventRenderer(transcript, form, request.headers, after)
        buffer.accept(known.left_s, is_logged=True)
        # All other listeners of this gateway may leave during the reads. A listener at another gateway keeps the
        # request alive.
        buffer.is_responsible = not known.metadata.is_background
        # 3) Read the output log up to that event.
        beginning = await stored.catch_up(buffer, transcript, events, after, known)
        # 4) Attach only now: it takes the output away from another gateway, and makes this one responsible.
        if not await attach(gateway, buffer, known):
            raise stored.not_found()
        # 5) Write the rest.
        request[REQUEST_ID] = call_id
        request[TRANSCRIPT] = transcript
        return await StreamWriter(request, buffer, transcript, events, meter, gateway.settings.write_timeout_s).run(
            beginning
        )


async def cancel(gateway: Gateway, dialect: Dialect, request: web.Request) -> web.Response:
    """POST /v1/chat/completions/{id}/cancel, /v1/completions/{id}/cancel: ends a call, also one in the background.

    A call that has ended stays as it is.
    """
    call_id, known = await find(gateway, dialect, request)
    found = [await gateway.retry(partial(gateway.broker.cancel, id_)) for id_ in _requests(call_id, known)]
    ran = not known.is_done or CancelReply.CANCELLED in found or CancelReply.FLAGGED in found
    return web.json_response({"id": dialect.prefix + call_id, "cancelled": ran})


async def find(gateway: Gateway, dialect: Dialect, request: web.Request) -> tuple[str, StoredCall]:
    """Returns the id of the call that the path names, and what Redis has of it. Raises NotFound or BrokerDown."""
    call_id = stored.read_call_id(request.match_info["id"], dialect.prefix)
    try:
        known = await gateway.retry(partial(stored.look_up, gateway.broker, call_id, caller_of(request).owner))
    except MessageError as error:
        note_corrupt_metadata(gateway, call_id, error)
        raise stored.not_found() from error
    if known is None or known.metadata.dialect != dialect.name:
        raise stored.not_found()
    return call_id, known


async def _look_up(gateway: Gateway, ids: Sequence[str], dialect: str, owner: str) -> StoredCall | None:
    """Returns what Redis has of the call with these requests; None if it is unknown, or of another dialect or owner.

    Raises BrokerDown, or InvalidRequest if the call has another number of requests.
    """
    try:
        known = await gateway.retry(partial(stored.look_up, gateway.broker, ids[0], owner))
    except MessageError as error:
        note_corrupt_metadata(gateway, ids[0], error)
        return None
    if known is None or known.metadata.dialect != dialect:
        return None
    if known.metadata.requests != len(ids):
        raise stored.several_prompts(known.metadata.requests)
    return known


async def attach(gateway: Gateway, buffer: OutputBuffer, known: StoredCall) -> bool:
    """Has the requests of a call published to this gateway from now on. Returns False if they are gone."""
    # Set first: the client may leave during the commands, which may have made this gateway a listener by then.
    buffer.is_responsible = not known.metadata.is_background
    try:
        attachments = [await gateway.retry(partial(gateway.broker.attach, id_, gateway.id)) for id_ in buffer.cursors]
    except BrokerDown:
        buffer.is_responsible = False  # the client will come again
        raise
    if attachments[0] is None:
        return False
    buffer.accept(known.left_s, is_logged=True)
    return True


def note_corrupt_metadata(gateway: Gateway, call_id: str, error: MessageError) -> None:
    """Counts metadata that cannot be decoded; the first one is logged."""
    gateway.meters.corrupt_metadata += 1
    if gateway.meters.corrupt_metadata == 1:
        log.error(
            "the stored metadata of call %s is corrupt (later ones are only counted): %s",
            call_id,
            error,
            extra={"request_id": call_id},
        )


def _log_prompt(call_id: str, body: dict[str, Any]) -> None:
    """Logs the beginning of a prompt, also if the call is then refused."""
    asked = {name: body[name] for name in ("messages", "prompt", "instructions", "input") if name in body}
    prompt = json.dumps(asked)[:MAX_LOGGED_PROMPT]
    log.info("request %s asks: %s", call_id, prompt, extra={"request_id": call_id, "prompt": prompt})


async def park(gateway: Gateway, dialect: Dialect, request: web.Request) -> web.Response:
    """POST .../{id}/park: sets a call aside with its tokens. A call that has ended, or is about to, stays as it is."""
    return await park_call(gateway, dialect.prefix, *await find(gateway, dialect, request))


async def unpark(gateway: Gateway, dialect: Dialect, request: web.Request) -> web.Response:
    """POST .../{id}/unpark: queues a parked call again. A call that is not parked stays as it is."""
    return await unpark_call(gateway, dialect.prefix, *await find(gateway, dialect, request), request)


async def park_call(gateway: Gateway, prefix: str, call_id: str, known: StoredCall) -> web.Response:
    """Parks a call that was found. Raises ParkingIsFull or BrokerDown."""
    return (await gateway.parking.park(_requests(call_id, known))).answer(prefix + call_id)


async def unpark_call(
    gateway: Gateway, prefix: str, call_id: str, known: StoredCall, request: web.Request
) -> web.Response:
    """Queues a call that was found again. Raises ApiError."""
    state = await gateway.parking.unpark(_requests(call_id, known), caller_of(request))
    return state.answer(prefix + call_id)


def _requests(call_id: str, known: StoredCall) -> list[str]:
    return [request_id(call_id, index) for index in range(known.metadata.requests)]
