"""The verbs of a call: `serve` a new one, `resume` the stream of one, `cancel`, `park` or `unpark` one."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from quire.gateway.admission.retry import down
from quire.gateway.admission.terms import read_terms
from quire.gateway.api import resume as stored
from quire.gateway.api.body_budget import release_body
from quire.gateway.api.call import Call
from quire.gateway.api.caller import caller_of
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.headers import IDEMPOTENCY_KEY, KEY
from quire.gateway.api.parsing import BODY, read_object
from quire.gateway.api.request_span import SPAN
from quire.gateway.api.resume import StoredCall, StoredCalls
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES, REQUEST_ID, USER_HASH, BrokerDown
from quire.gateway.serving.service import Gateway
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import request_id
from quire.gateway.stream.transcript import TRANSCRIPT, Transcript
from quire.gateway.stream.writer import StreamWriter, write_body
from quire.gateway.telemetry.request_meter import BEGAN, METER
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.states import CancelReply

log = logging.getLogger("gateway")

# Characters of a prompt that are logged with --log-prompts.
MAX_LOGGED_PROMPT = 4096


# Checks and tokenizes the body of a call, as `Dialect.read` does.
CallReader = Callable[..., Awaitable[Call]]
# Writes the answer to an accepted call. The id of the call is `request[REQUEST_ID]`.
AnswerWriter = Callable[[Gateway, web.Request, OutputBuffer, Transcript, Call], Awaitable[web.StreamResponse]]


async def serve(
    dialect: Dialect, gateway: Gateway, request: web.Request, read: CallReader | None = None
) -> web.StreamResponse:
    """POST /v1/chat/completions, /v1/completions, /v1/messages, /v1/responses: generates an answer.

    read: reads the body of a call that is not one of the dialect's own.
    """
    request[NO_EFFECT_NAMES] = ", ".join(dialect.check_headers(request.headers))
    return await serve_with(dialect, gateway, request, partial(_write_answer, dialect), read)


async def _write_answer(
    dialect: Dialect,
    gateway: Gateway,
    request: web.Request,
    buffer: OutputBuffer,
    transcript: Transcript,
    call: Call,
) -> web.StreamResponse:
    """Write the answer as events or as one body; or only that the call was accepted."""
    call_id, model, meter = request[REQUEST_ID], gateway.model, request[METER]
    write_timeout_s = gateway.settings.write_timeout_s
    if call.stream:
        request[TRANSCRIPT] = transcript
        events = dialect.events(call_id, model, transcript, request.headers)
        return await StreamWriter(request, buffer, transcript, events, meter, write_timeout_s).run(events.opening())
    form = dialect.form(call_id, model, transcript.metadata)
    if call.about.is_background:
        return json_text(await dialect.status(form, call_id, not transcript.is_joined))
    request[TRANSCRIPT] = transcript
    parts = await form.whole(buffer, transcript)
    meter.collected(transcript.tokens)
    return await write_body(request, parts, meter, write_timeout_s)


async def serve_with(
    dialect: Dialect, gateway: Gateway, request: web.Request, write: AnswerWriter, read: CallReader | None = None
) -> web.StreamResponse:
    """Read and submit a call, or attach to the earlier one of its idempotency key; `write` writes the answer."""
    settings = gateway.settings
    meter = request[METER] = gateway.meters.open(dialect.name, "new", request[BEGAN])
    # 1) Read the call: parse, check and tokenize it.
    body = await read_object(request, settings.max_body_bytes, settings.body_timeout_s)
    if settings.log_prompts:
        _log_prompt(request[REQUEST_ID], body)
    call = await (read or dialect.read)(body, gateway.limits, gateway.renderer_for(request))
    caller = caller_of(request)
    call = gateway.key_limits.restricted(caller, call, body)
    call.note(request, gateway.user_hash_key)
    terms = read_terms(gateway.submission.terms, request.headers, body, request.path, call, settings.max_timeout_s)
    terms = gateway.key_limits.charged(caller, call.model, terms, request.get(USER_HASH, ""))
    traceparent = ""
    if (span := request.get(SPAN)) is not None:
        span.asks(dialect.name, call)
        traceparent = str(span.context)
    call_id = request[REQUEST_ID]
    requests = call.requests(call_id)
    metadata = call.metadata(dialect.name, int(time.time()))
    terms = terms._replace(
        metadata=metadata.encode(),
        traceparent=traceparent,
        retention_s=call.retention_s,
        conversation=call.conversation,
        joins=call.joins,
    )
    terms = gateway.affinity.placed(metadata.prompt_cache_key or call.chain, call.beginnings, requests, terms)
    terms = gateway.deadlines.estimated(requests, terms)
    # The body is not needed while the answer is written. Its images count until Redis has them.
    del body
    request.pop(BODY, None)
    if not call.files:
        release_body(request)
    # 2) Listen before the requests are submitted, so that no frame is missed.
    can_return = bool(terms.idempotency_key) or (call.stream and len(requests) == 1)
    with gateway.listening([item.id for item in requests], can_return, caller.owner) as buffer:
        # 3) Submit a request for each prompt.
        first, rates, is_left = await gateway.submission.submit(requests, terms, call.files)
        call = replace(call, files={})
        release_body(request)
        gateway.affinity.note(first, is_left)
        gateway.key_limits.tell(request, rates)
        if first == call_id:
            meter.accepted(metadata.prompt_tokens)
            buffer.accept(terms.deadline_ms / 1000 or None, is_logged=False)
            buffer.is_responsible = not terms.is_background
            # 4) Answer.
            transcript = Transcript(metadata, gateway.model, buffer.cursors)
            return await write(gateway, request, buffer, transcript, call)
    # The idempotency key stands for an earlier call. 3) Attach to the requests of that call.
    meter.kind = "joined"
    ids = [request_id(first, index) for index in range(len(requests))]
    with gateway.listening(ids, owner=caller.owner) as buffer:
        # The submission may have added requests that the earlier call lacked, or listeners to its requests.
        buffer.is_responsible = not terms.is_background
        known = await stored_calls(gateway, caller.owner).look_up(first, dialect.name)
        if known is not None and known.metadata.requests != len(ids):
            raise stored.several_prompts(known.metadata.requests)
        if known is None or not await attach(gateway, buffer, known):
            raise down(f"request {first} of an idempotency key is gone")
        request[REQUEST_ID] = first
        # 4) Answer.
        transcript = Transcript(known.metadata, gateway.model, buffer.cursors, is_joined=True)
        return await write(gateway, request, buffer, transcript, call)


async def resume(dialect: Dialect, gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """GET .../{id}/stream, GET /v1/responses/{id}?stream=true: goes on after the client's last event."""
    meter = request[METER] = gateway.meters.open(dialect.name, "resumed", request[BEGAN])
    # 1) Read which event the client has.
    place = dialect.read_place(request)
    await gateway.retry.check_subscribed()
    # 2) Find the call in Redis.
    call_id, known = await find(dialect, gateway, request)
    if known.metadata.requests > 1:
        raise stored.several_prompts(known.metadata.requests)
    with gateway.listening([call_id], owner=caller_of(request).owner) as buffer:
        transcript = Transcript(known.metadata, gateway.model, buffer.cursors, is_joined=True)
        events = dialect.events(call_id, gateway.model, transcript, request.headers, place)
        buffer.accept(known.left_s, is_logged=True)
        # All other listeners of this gateway may leave during the reads. A listener at another gateway keeps the
        # request alive.
        buffer.is_responsible = not known.metadata.is_background
        # 3) Read the output log up to that event.
        beginning, meter.tokens = await dialect.catch_up(buffer, transcript, events, place, known)
        # 4) Attach only now: it takes the output away from another gateway, and makes this one responsible.
        if not await attach(gateway, buffer, known):
            raise dialect.not_found(request.match_info["id"])
        # 5) Write the rest.
        request[REQUEST_ID] = call_id
        request[TRANSCRIPT] = transcript
        return await StreamWriter(request, buffer, transcript, events, meter, gateway.settings.write_timeout_s).run(
            beginning
        )


async def cancel(dialect: Dialect, gateway: Gateway, request: web.Request) -> web.Response:
    """POST .../{id}/cancel: ends a call, also one in the background. A call that has ended stays as it is."""
    call_id, known = await find(dialect, gateway, request)
    was_cancelled = await cancel_requests(gateway, call_id, known)
    return web.json_response({"id": dialect.prefix + call_id, "cancelled": was_cancelled})


async def cancel_requests(gateway: Gateway, call_id: str, known: StoredCall) -> bool:
    """Cancel the requests of a call. Returns False if all had ended. Raises BrokerDown."""
    replies = [await gateway.retry(partial(gateway.broker.cancel, id_)) for id_ in _requests(call_id, known)]
    return not known.is_done or CancelReply.CANCELLED in replies or CancelReply.FLAGGED in replies


def stored_calls(gateway: Gateway, owner: str) -> StoredCalls:
    """Return the calls of an owner that Redis has."""
    return StoredCalls(gateway.broker, gateway.retry, partial(note_corrupt_metadata, gateway), owner)


async def is_repeated(gateway: Gateway, request: web.Request) -> bool:
    """Return whether the Idempotency-Key of a call stands for an earlier call. Raises BrokerDown."""
    key, broker = request.headers.get(IDEMPOTENCY_KEY, ""), gateway.broker
    if not KEY.fullmatch(key):
        return False
    name = broker.keys.idempotency(caller_of(request).scoped(key))
    first: Any = await gateway.retry(partial(broker.client.hget, name, "id"))
    return bool(first and await gateway.retry(partial(broker.client.exists, broker.keys.request(text(first)))))


async def find(dialect: Dialect, gateway: Gateway, request: web.Request, name: str = "") -> tuple[str, StoredCall]:
    """Return the id of a call, by default the one that the path names, and what Redis has of it.

    Raises NotFound or BrokerDown.
    """
    public_id = name or request.match_info["id"]
    call_id = stored.read_call_id(public_id, dialect.prefix)
    known = await stored_calls(gateway, caller_of(request).owner).look_up(call_id, dialect.name) if call_id else None
    if known is None or not dialect.is_kept(known.metadata):
        raise dialect.not_found(public_id)
    return call_id, known


async def attach(gateway: Gateway, buffer: OutputBuffer, known: StoredCall) -> bool:
    """Have the requests of a call published to this gateway from now on. Returns False if they are gone."""
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
    """Count metadata that cannot be decoded; the first one is logged."""
    gateway.meters.corrupt_metadata += 1
    if gateway.meters.corrupt_metadata == 1:
        log.error(
            "the stored metadata of call %s is corrupt (later ones are only counted): %s",
            call_id,
            error,
            extra={"request_id": call_id},
        )


def _log_prompt(call_id: str, body: dict[str, Any]) -> None:
    """Log the beginning of a prompt, also if the call is then refused."""
    asked = {name: body[name] for name in ("messages", "prompt", "instructions", "input") if name in body}
    prompt = json.dumps(asked)[:MAX_LOGGED_PROMPT]
    log.info("request %s asks: %s", call_id, prompt, extra={"request_id": call_id, "prompt": prompt})


async def park(dialect: Dialect, gateway: Gateway, request: web.Request) -> web.Response:
    """POST .../{id}/park: sets a call aside with its tokens. A call that has ended, or is about to, stays as it is."""
    call_id, known = await find(dialect, gateway, request)
    return (await gateway.parking.park(_requests(call_id, known))).answer(dialect.prefix + call_id)


async def unpark(dialect: Dialect, gateway: Gateway, request: web.Request) -> web.Response:
    """POST .../{id}/unpark: queues a parked call again. A call that is not parked stays as it is."""
    call_id, known = await find(dialect, gateway, request)
    state = await gateway.parking.unpark(_requests(call_id, known), caller_of(request))
    return state.answer(dialect.prefix + call_id)


def _requests(call_id: str, known: StoredCall) -> list[str]:
    return [request_id(call_id, index) for index in range(known.metadata.requests)]


def json_text(text: str) -> web.Response:
    """Return an answer of JSON that is written already."""
    return web.Response(text=text, content_type="application/json")
