"""POST /v1/responses: reads calls, with the conversations that they continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from aiohttp import web

from quire.gateway.api.call import Call
from quire.gateway.api.conversation import read_call
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.responses.body import PREFIX, ResponseStatus, is_stored
from quire.gateway.api.responses.events import START, ResponseEvents
from quire.gateway.api.responses.images import files_of, read_images, stored_items
from quire.gateway.api.responses.items import Item, droppable, without_oldest
from quire.gateway.api.responses.query import read_place, wrong_place
from quire.gateway.api.responses.request import ResponseRequest, read_request
from quire.gateway.api.responses.store import DIALECT, ResponseStore, item_place, not_found, output_of, packed
from quire.gateway.api.resume import StoredCall
from quire.gateway.errors.api_errors import InvalidRequest, NotFound, refused
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.transcript import Transcript
from quire.gateway.stream.writer import AnswerFormat, EventRenderer

# Other responses that the item references of one call may name.
MAX_REFERENCED = 64
# Names of parameters in errors of the common code, and the names of this API.
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits of stored responses. retention_s: after their end. conversation_bytes: of JSON."""

    retention_s: int
    conversation_bytes: int


class ResponseDialect(Dialect):
    """The Responses API."""

    name = DIALECT
    prefix = PREFIX

    def __init__(self, store: ResponseStore, storage: StorageLimits) -> None:
        self.store = store
        self._storage = storage

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call, after the conversation of the previous response. Raises ApiError."""
        return await self._read(body, limits, renderer, may_store=True)

    async def read_unstored(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call whose conversation is not stored, so that it may be longer. Raises ApiError."""
        return await self._read(body, limits, renderer, may_store=False)

    async def _read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer, may_store: bool) -> Call:
        request = read_request(body, limits, renderer.model.template)
        is_stored = request.is_stored and may_store
        request.call.check(limits)
        before = await self.store.whole_conversation(request.previous) if request.previous else []
        request = request.following(before)
        echo = request.echo()
        items = before + await self._resolved(request.items, before)
        await read_images(request.items, before, renderer)
        if before:
            await self.store.load_images(request.previous, before)
        conversation = self._written(request, items) if is_stored else b""
        try:
            call = await _fitting_call(request, items, limits, renderer, echo)
        except InvalidRequest as error:
            raise _renamed(request.renamed(error)) from error
        return replace(
            request.with_loosened(call),
            retention_s=self._storage.retention_s if is_stored else 0,
            conversation=await packed(conversation) if is_stored else b"",
            # Also those of items that were left out of the prompt: the conversation names them.
            files=files_of(items) if is_stored else call.files,
            chain=items[0]["id"] if items and (is_stored or request.previous) else "",
        )

    def form(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> ResponseEvents:
        return ResponseEvents(call_id, model, metadata)

    def events(
        self, call_id: str, model: ServedModel, transcript: Transcript, headers: Mapping[str, str], place: int = START
    ) -> EventRenderer:
        form = ResponseEvents(call_id, model, transcript.metadata, place)
        return EventRenderer(transcript, form, headers, adds_ids=False)

    async def status(self, form: AnswerFormat, call_id: str, is_new: bool) -> str:
        if is_new:
            assert isinstance(form, ResponseEvents)
            return form.body.running(ResponseStatus.QUEUED)
        return await self.store.json(PREFIX + call_id)

    def is_kept(self, metadata: CallMetadata) -> bool:
        return is_stored(metadata)

    def not_found(self, public_id: str) -> NotFound:
        return not_found(public_id)

    def read_place(self, request: web.Request) -> int:
        return read_place(request)[1]

    async def catch_up(
        self, buffer: OutputBuffer, transcript: Transcript, events: EventRenderer, place: int, known: StoredCall
    ) -> tuple[str, int]:
        beginning = events.opening()
        if known.is_done and place != START:
            while not transcript.ended:
                beginning += events.feed(await buffer.next())
            last = cast("ResponseEvents", events.form).next_number - 1
            if place > last:
                raise wrong_place(f"The response has ended with the event {last}.")
        return beginning, transcript.tokens

    async def _resolved(self, items: Sequence[Item], before: Sequence[Item]) -> list[Item]:
        """Return the items with those that item references name. Raises InvalidRequest."""
        if all(item["type"] != "item_reference" for item in items):
            return list(items)
        known = {item["id"]: item for item in before}
        responses: dict[str, list[Item]] = {}
        resolved = []
        for index, item in enumerate(items):
            if item["type"] == "item_reference":
                name = f"input[{index}].id"
                referenced = known.get(item["id"]) or await self._output_item(item["id"], name, responses)
                if referenced is None:
                    raise refused(name, f"Item with id {item['id']!r} not found.", code="item_not_found")
                item = referenced
            resolved.append(item)
        return resolved

    async def _output_item(self, item_id: str, name: str, responses: dict[str, list[Item]]) -> Item | None:
        """Return the output item of a stored response; None if unknown."""
        place = item_place(item_id)
        if place is None:
            return None
        call_id, index = place
        if call_id not in responses:
            if len(responses) == MAX_REFERENCED:
                raise refused(name, f"{name}: the references of one call may name at most {MAX_REFERENCED} responses.")
            try:
                responses[call_id] = output_of(await self.store.read(PREFIX + call_id))
            except NotFound:
                return None
        output = responses[call_id]
        return output[index] if index < len(output) and output[index]["id"] == item_id else None

    def _written(self, request: ResponseRequest, items: Sequence[Item]) -> bytes:
        """Return the conversation as it is stored. Raises InvalidRequest if it is too long."""
        data = json.dumps(stored_items(items), ensure_ascii=False, separators=(",", ":")).encode()
        limit = self._storage.conversation_bytes
        if len(data) > limit:
            name = "previous_response_id" if request.previous else "input"
            raise refused(
                name,
                f"{name} makes a conversation of {len(data)} bytes; at most {limit} are stored (this server's setting "
                "--max-conversation-bytes). Send store: false, or begin a new conversation.",
            )
        return data


async def _fitting_call(
    request: ResponseRequest, items: Sequence[Item], limits: RequestLimits, renderer: Renderer, echo: str
) -> Call:
    """Return the call with all items, or, with `truncation: auto`, without the oldest ones that do not fit."""
    try:
        return await read_call(request.conversation(items), request.call, limits, renderer, echo)
    except InvalidRequest as error:
        if error.code != "context_length_exceeded" or not request.is_truncated:
            raise
        refusal = error
    # The smallest number of dropped items that is enough; fewer tries than there are bits in the number of items.
    low, high = 1, droppable(items)
    call: Call | None = None
    while low <= high:
        count = (low + high) // 2
        conversation = request.conversation(without_oldest(items, count))
        try:
            call = await read_call(conversation, request.call, limits, renderer, echo)
            high = count - 1
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
            low = count + 1
    if call is None:
        raise refusal
    return call


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """Return the error with the names of this API."""
    param, message = error.param or "", error.message
    if name := _NAMES.get(param):
        # A template writes its errors itself.
        message = message if error.code == "template_error" else message.replace(param, name)
        param = name
    for old, new in ((".function.parameters", ".parameters"), ("response_format", "text.format")):
        param, message = param.replace(old, new), message.replace(old, new)
    return InvalidRequest(message, param=param or None, code=error.code, headers=error.headers)
