"""The handlers of /v1/responses: create, count tokens, read, stream again, cancel, park, unpark, delete, list
the input items."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from aiohttp import web

from quire.gateway.api.call import Call
from quire.gateway.api.caller import caller_of
from quire.gateway.api.parsing import read_object
from quire.gateway.api.responses.body import PREFIX, ResponseStatus
from quire.gateway.api.responses.dialect import ResponseDialect, StorageLimits
from quire.gateway.api.responses.events import START, ResponseEvents
from quire.gateway.api.responses.items import Item
from quire.gateway.api.responses.parameters import LOGPROBS, NOT_HERE
from quire.gateway.api.responses.store import DIALECT, ResponseStore, add_delta
from quire.gateway.api.resume import LAST_EVENT_ID, STARTING_AFTER, StoredCall
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES, REQUEST_ID, InvalidRequest, refused
from quire.gateway.serving import calls
from quire.gateway.serving.dispatch import ModelDirectory, by_body, by_id
from quire.gateway.serving.service import Gateway
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.transcript import TRANSCRIPT, Transcript
from quire.gateway.stream.writer import EventRenderer, StreamWriter, write_body
from quire.gateway.telemetry.request_meter import BEGAN, METER
from quire.shared.config.validators import shown

# Seconds that a cancelled response gets to end: its worker is told with its next commit.
CANCEL_S = 5.0
# Items per page of the input items (OpenAI API reference).
DEFAULT_PAGE, MAX_PAGE = 20, 100


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Returns the routes of the Responses API."""
    # An id has its prefix, so that other paths below are not taken for one.
    path, one = "/v1/responses", f"/v1/responses/{{id:{PREFIX}[^/]*}}"
    return [
        web.post(path, by_body(directory, _create, is_charged=True)),
        web.post(f"{path}/input_tokens", by_body(directory, _count)),
        # No HEAD: a HEAD request would attach to the generation request.
        web.get(one, by_id(directory, _retrieve), allow_head=False),
        web.delete(one, by_id(directory, _delete)),
        web.post(f"{one}/cancel", by_id(directory, _cancel)),
        web.post(f"{one}/park", by_id(directory, _park)),
        web.post(f"{one}/unpark", by_id(directory, _unpark)),
        web.get(f"{one}/input_items", by_id(directory, _input_items), allow_head=False),
    ]


class Responses:
    """The handlers of one model."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def _store(self, request: web.Request) -> ResponseStore:
        """The responses that the caller of a request owns."""
        gateway = self._gateway
        note_corrupt = partial(calls.note_corrupt_metadata, gateway)
        return ResponseStore(gateway.broker, gateway.retry, gateway.model, note_corrupt, caller_of(request).owner)

    def _dialect(self, request: web.Request) -> ResponseDialect:
        settings = self._gateway.settings
        limits = StorageLimits(settings.response_retention_s, settings.max_conversation_bytes)
        return ResponseDialect(self._store(request), limits)

    async def count(self, request: web.Request) -> web.Response:
        """POST /v1/responses/input_tokens: counts the tokens of the prompt of a response with this body."""
        gateway = self._gateway
        body = await read_object(request, gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)
        call = await self._dialect(request).read_unstored(body, gateway.limits, gateway.renderer)
        call.options.labels.note(request, gateway.user_hash_key)
        return web.json_response({"object": "response.input_tokens", "input_tokens": call.prompt_tokens})

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses: generates a response."""
        return await calls.serve_with(self._gateway, self._dialect(request), request, self._answer)

    async def _answer(
        self, gateway: Gateway, request: web.Request, buffer: OutputBuffer, transcript: Transcript, call: Call
    ) -> web.StreamResponse:
        """Writes events, the complete response, or the status of a response in the background."""
        form = self._dialect(request).form(request[REQUEST_ID], gateway.model, transcript.metadata)
        options = call.options
        meter, write_timeout_s = request[METER], gateway.settings.write_timeout_s
        if options.stream:
            request[TRANSCRIPT] = transcript
            events = EventRenderer(transcript, form, request.headers, adds_ids=False)
            return await StreamWriter(request, buffer, transcript, events, meter, write_timeout_s).run(events.opening())
        if options.background:
            if transcript.is_joined:
                return _json((await self._store(request).read(PREFIX + request[REQUEST_ID])).json(gateway.model))
            return _json(form.body.running(ResponseStatus.QUEUED))
        request[TRANSCRIPT] = transcript
        while not transcript.ended:
            for item in await buffer.next():
                for delta in transcript.feed(item):
                    add_delta(form.output, delta)
        if transcript.error is not None:
            raise transcript.error
        meter.collected(transcript.tokens)
        return await write_body(request, [form.body.ended(form.output, transcript.usage)], meter, write_timeout_s)

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}: the response as it is now, or its events with `?stream=true`."""
        is_stream, after = _read_query(request)
        if is_stream:
            return await self._resume(request, after)
        response = await self._store(request).read(request.match_info["id"])
        return _json(response.json(self._gateway.model))

    async def _resume(self, request: web.Request, after: int) -> web.StreamResponse:
        """Writes the events after the number `after`."""
        gateway = self._gateway
        meter = request[METER] = gateway.meters.open(DIALECT, "resumed", request[BEGAN])
        await gateway.retry.check_subscribed()
        call_id, known = await self._store(request).look_up(request.match_info["id"])
        with gateway.listening([call_id], owner=caller_of(request).owner) as buffer:
            transcript = Transcript(known.metadata, gateway.model, buffer.cursors, is_joined=True)
            form = ResponseEvents(call_id, gateway.model, known.metadata, after)
            events = EventRenderer(transcript, form, request.headers, adds_ids=False)
            buffer.accept(known.left_s, is_logged=True)
            beginning = events.opening()
            if known.is_done and after != START:
                while not transcript.ended:
                    beginning += events.feed(await buffer.next())
                if after >= form.next_number:
                    raise _wrong_place(f"The response has ended with the event {form.next_number - 1}.")
            if not known.is_done and not await calls.attach(gateway, buffer, known):
                raise refused("response_id", "The response was deleted.")
            meter.tokens = transcript.tokens
            request[REQUEST_ID] = call_id
            request[TRANSCRIPT] = transcript
            write_timeout_s = gateway.settings.write_timeout_s
            return await StreamWriter(request, buffer, transcript, events, meter, write_timeout_s).run(beginning)

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel: ends a response in the background; one that has ended stays as it is."""
        gateway, response_id = self._gateway, request.match_info["id"]
        call_id, known = await self._store(request).look_up(response_id)
        if not known.metadata.is_background:
            raise refused(
                "response_id",
                "Only a response with background: true can be cancelled; close the connection of any other one.",
                code="not_in_background",
            )
        if not known.is_done:
            await gateway.retry(partial(gateway.broker.cancel, call_id))
            await self._wait_for_end(call_id, known)
        return _json((await self._store(request).read(response_id)).json(gateway.model))

    async def _wait_for_end(self, call_id: str, known: StoredCall) -> None:
        """Waits until a response has ended, for CANCEL_S at most."""
        gateway = self._gateway
        with gateway.listening([call_id]) as buffer, suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                transcript = Transcript(known.metadata, gateway.model, buffer.cursors, is_joined=True)
                if not await calls.attach(gateway, buffer, known):
                    return
                while not transcript.ended:
                    for item in await buffer.next():
                        transcript.feed(item)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}: deletes a response; one that still runs is cancelled first."""
        gateway, response_id = self._gateway, request.match_info["id"]
        call_id, known = await self._store(request).look_up(response_id)
        if not known.is_done:
            await gateway.retry(partial(gateway.broker.cancel, call_id))
        await gateway.retry(partial(gateway.broker.delete, call_id))
        return web.json_response({"id": response_id, "object": "response", "deleted": True})

    async def park(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/park: parks a stored response."""
        call_id, known = await self._store(request).look_up(request.match_info["id"])
        return await calls.park_call(self._gateway, PREFIX, call_id, known)

    async def unpark(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/unpark: queues a parked response again."""
        call_id, known = await self._store(request).look_up(request.match_info["id"])
        return await calls.unpark_call(self._gateway, PREFIX, call_id, known, request)

    async def input_items(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}/input_items: the conversation before the answer, in pages."""
        limit, order, after = _read_page(request)
        call_id, _ = await self._store(request).look_up(request.match_info["id"])
        items = await self._store(request).conversation(call_id)
        if order == "desc":
            items.reverse()
        if after:
            items = items[_index_of(items, after) + 1 :]
        page = items[:limit]
        return web.json_response(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > len(page),
            }
        )


async def _create(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).create(request)


async def _count(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).count(request)


async def _retrieve(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).retrieve(request)


async def _delete(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).delete(request)


async def _cancel(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).cancel(request)


async def _park(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).park(request)


async def _unpark(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).unpark(request)


async def _input_items(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return await Responses(gateway).input_items(request)


def _json(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/json")


def _read_query(request: web.Request) -> tuple[bool, int]:
    """Reads whether a GET asks for events, and the number of the client's last event. Raises InvalidRequest."""
    query = _only(request, ("stream", STARTING_AFTER, "include_obfuscation"))
    is_stream = _flag("stream", query.get("stream", "false"))
    if _flag("include_obfuscation", query.get("include_obfuscation", "false")):
        raise refused("include_obfuscation", "include_obfuscation must be false: this server adds no random text.")
    if not is_stream:
        if STARTING_AFTER in query:
            raise refused(STARTING_AFTER, f"{STARTING_AFTER} is allowed only with stream=true; leave it out.")
        return False, START
    # The header has precedence: browsers that reconnect update only the header.
    places = ((LAST_EVENT_ID, request.headers.get(LAST_EVENT_ID)), (STARTING_AFTER, query.get(STARTING_AFTER)))
    for name, given in places:
        if given is not None:
            if not given.isascii() or not given.isdigit() or len(given) > 10:
                raise _wrong_place(f"{name} must be the sequence_number of an event, not {shown(given)}.", name)
            return True, int(given)
    return True, START


def _read_page(request: web.Request) -> tuple[int, str, str]:
    """The limit, the order and the item before the page. Raises InvalidRequest."""
    query = _only(request, ("limit", "order", "after"))
    limit = query.get("limit", str(DEFAULT_PAGE))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or not 1 <= int(limit) <= MAX_PAGE:
        raise refused("limit", f"limit must be an integer from 1 to {MAX_PAGE}, not {shown(limit)}.")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refused("order", f"order must be asc or desc, not {shown(order)}.")
    return int(limit), order, query.get("after", "")


def _only(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """The query of a request, each parameter once; `include` has no effect and is named. Raises InvalidRequest."""
    found: dict[str, str] = {}
    for name, value in request.query.items():
        if name in ("include", "include[]"):
            if value != LOGPROBS and value not in NOT_HERE:
                raise refused("include", f"include has no {shown(value)}.")
            request[NO_EFFECT_NAMES] = "include"
            continue
        if name not in known:
            raise InvalidRequest(
                f"{name[:80]!r} is not a parameter of this call; it has {', '.join(known)}.",
                param=name[:80],
                code="unknown_parameter",
            )
        if name in found:
            raise refused(name, f"{name} is given twice; give it once.")
        found[name] = value
    return found


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise refused(name, f"{name} must be true or false, not {shown(value)}.")
    return value == "true"


def _index_of(items: Sequence[Item], item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise refused("after", f"after names no item of this response: {shown(item_id)}.")


def _wrong_place(message: str, name: str = STARTING_AFTER) -> InvalidRequest:
    return InvalidRequest(message, param=name, code="invalid_event_id")
