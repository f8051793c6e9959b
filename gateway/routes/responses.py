"""The handlers that only /v1/responses has, and responses in batches.

The handlers count tokens, read, cancel, delete, and list the input items.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from quire.gateway.api.call import Call
from quire.gateway.api.caller import caller_of
from quire.gateway.api.parsing import read_object
from quire.gateway.api.responses.body import fields_of
from quire.gateway.api.responses.chain import CHAIN
from quire.gateway.api.responses.dialect import ResponseDialect, StorageLimits
from quire.gateway.api.responses.query import read_page, read_place
from quire.gateway.api.responses.request import read_request
from quire.gateway.api.responses.store import ResponseStore
from quire.gateway.api.resume import StoredCall
from quire.gateway.errors.api_errors import refused
from quire.gateway.features.compaction.compact_calls import compact, summarise
from quire.gateway.features.conversations.conversation_calls import CONVERSATION, ConversationStore, settled, write_page
from quire.gateway.serving import calls
from quire.gateway.serving.service import Gateway, Hold
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.transcript import Transcript

__all__ = ["ResponseLines", "cancel", "compact", "count", "delete", "input_items", "of_caller", "retrieve"]

# Seconds that a cancelled response gets to end: its worker is told with its next commit.
CANCEL_S = 5.0


def dialect_of(gateway: Gateway, owner: str, **more: Any) -> ResponseDialect:
    """Return the dialect for the responses of one owner. more: what calls of clients have, see `ResponseDialect`."""
    settings = gateway.settings
    limits = StorageLimits(settings.response_retention_s, settings.max_conversation_bytes)
    return ResponseDialect(ResponseStore(calls.stored_calls(gateway, owner), gateway.model), limits, **more)


def dialect(gateway: Gateway, request: web.Request) -> ResponseDialect:
    """Return the dialect for the responses that the caller of a request owns."""
    owner, is_repeated = caller_of(request).owner, partial(calls.is_repeated, gateway, request)
    return dialect_of(
        gateway,
        owner,
        conversations=ConversationStore(gateway, owner, is_repeated),
        summarise=partial(summarise, gateway, request),
        is_repeated=is_repeated,
        chain=request.get(CHAIN),
    )


def of_caller(verb: Callable[..., Awaitable[web.StreamResponse]]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the handler of a verb for the responses of the caller."""

    async def handle(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        return await verb(dialect(gateway, request), gateway, request)

    return handle


async def count(responses: ResponseDialect, gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens: counts the tokens of the prompt of a response with this body."""
    body = await read_object(request, gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)
    call = await responses.read_unstored(body, gateway.limits, gateway.renderer_for(request))
    call.note(request, gateway.user_hash_key)
    return web.json_response({"object": "response.input_tokens", "input_tokens": call.about.prompt_tokens})


async def retrieve(responses: ResponseDialect, gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}: the response as it is now, or its events with `?stream=true`."""
    is_stream, _ = read_place(request)
    if is_stream:
        return await calls.resume(responses, gateway, request)
    return calls.json_text(await responses.store.json(request.match_info["id"]))


async def cancel(responses: ResponseDialect, gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/responses/{id}/cancel: ends a response in the background; one that has ended stays as it is."""
    call_id, known = await calls.find(responses, gateway, request)
    if not known.metadata.is_background:
        raise refused(
            "response_id",
            "Only a response with background: true can be cancelled; close the connection of any other one.",
            code="not_in_background",
        )
    if not known.is_done:
        await calls.cancel_requests(gateway, call_id, known)
        await _wait_for_end(gateway, call_id, known)
    return calls.json_text(await responses.store.json(request.match_info["id"]))


async def _wait_for_end(gateway: Gateway, call_id: str, known: StoredCall) -> None:
    """Wait until a response has ended, for CANCEL_S at most."""
    with gateway.listening([call_id]) as buffer, suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_S):
            transcript = Transcript(known.metadata, gateway.model, buffer.cursors, is_joined=True)
            if not await calls.attach(gateway, buffer, known):
                return
            while not transcript.ended:
                for item in await buffer.next():
                    transcript.feed(item)


async def delete(responses: ResponseDialect, gateway: Gateway, request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}: deletes a response; one that still runs is cancelled first."""
    call_id, known = await calls.find(responses, gateway, request)
    if not known.is_done:
        await calls.cancel_requests(gateway, call_id, known)
    if conversation := fields_of(known.metadata).get("conversation"):
        await settled(gateway, conversation["id"].removeprefix(CONVERSATION))
    await gateway.retry(partial(gateway.broker.delete, call_id))
    return web.json_response({"id": request.match_info["id"], "object": "response", "deleted": True})


async def input_items(responses: ResponseDialect, gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}/input_items: the conversation before the answer, in pages."""
    query = read_page(request)
    call_id, _ = await calls.find(responses, gateway, request)
    items = await responses.store.conversation(call_id)
    return await write_page(gateway, request, items, query, partial(responses.store.files, call_id))


class ResponseLines:
    """Responses as lines of batches. They are not stored: the output file has them."""

    def __init__(self, gateway: Gateway, owner: str) -> None:
        self._gateway = gateway
        self._owner = owner
        self._dialect = dialect_of(gateway, owner)
        self.name = self._dialect.name

    def check(self, body: dict[str, Any]) -> None:
        read_request({**body, "store": False}, self._gateway.limits)

    async def read(self, body: dict[str, Any], hold: Hold) -> Call:
        renderer = self._gateway.renderer_of(self._owner, hold)
        return await self._dialect.read({**body, "store": False}, self._gateway.limits, renderer)

    def form_of(self, call: Call) -> None:
        return None

    async def answer(self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: object) -> Iterable[str]:
        return await self._dialect.form(call_id, self._gateway.model, transcript.metadata).whole(buffer, transcript)
