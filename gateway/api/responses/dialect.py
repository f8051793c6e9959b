"""POST /v1/responses: reads calls, with the conversations that they continue."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from aiohttp import web

from quire.gateway.api.call import Call
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.responses.body import PREFIX, ResponseStatus, is_stored, warm_up_echo
from quire.gateway.api.responses.chain import Chain
from quire.gateway.api.responses.events import START, ResponseEvents
from quire.gateway.api.responses.images import (
    check_stored,
    digests_of,
    files_of,
    read_images,
    set_images,
    stored_items,
)
from quire.gateway.api.responses.items import Item, with_own_ids
from quire.gateway.api.responses.query import read_place, wrong_place
from quire.gateway.api.responses.request import ResponseRequest, read_request
from quire.gateway.api.responses.store import DIALECT, ResponseStore, item_place, not_found, output_of, packed
from quire.gateway.api.responses.summaries import (
    Summarise,
    compacted_call,
    compacting_call,
    fitting_call,
    read_compact_request,
    read_summary,
)
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


class JoinedConversation(Protocol):
    """A conversation that a call continues. version: of the items that the caller has read; empty if another response
    continues it, so that only a repeated call is accepted."""

    id: str
    version: str
    items: list[Item]

    async def files(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return files of its images by digest. Raises ApiError."""
        ...


class Conversations(Protocol):
    """The conversations of one owner."""

    async def join(self, conversation_id: str) -> JoinedConversation:
        """Return a conversation that no response continues, or that of a repeated call. Raises ApiError."""
        ...


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits of stored responses. retention_s: after their end. conversation_bytes: of JSON."""

    retention_s: int
    conversation_bytes: int


class ResponseDialect(Dialect):
    """The Responses API."""

    name = DIALECT
    prefix = PREFIX

    def __init__(
        self,
        store: ResponseStore,
        storage: StorageLimits,
        conversations: Conversations | None = None,
        summarise: Summarise | None = None,
        is_repeated: Callable[[], Awaitable[bool]] | None = None,
        chain: Chain | None = None,
    ) -> None:
        """conversations: those that calls may continue. summarise: see `Summarise`. Calls without them have no such
        parameter. is_repeated: returns whether the call only repeats an earlier one, which has its summary. chain: of
        the connection, if it keeps responses that are not stored."""
        self.store = store
        self._storage = storage
        self._conversations = conversations
        self._summarise = summarise
        self._is_repeated = is_repeated
        self._chain = chain

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call, after the conversation of the previous response. Raises ApiError."""
        return await self._read(body, limits, renderer, may_store=True)

    async def read_unstored(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call whose conversation is not stored, so that it may be longer. Raises ApiError."""
        return await self._read(body, limits, renderer, may_store=False)

    async def _read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer, may_store: bool) -> Call:
        request = read_request(body, limits, renderer.model.template)
        request.call.check(limits)
        if request.compact_threshold and may_store and self._summarise is None:
            raise refused("context_management", "context_management is not supported here; leave it out.")
        before, joined = await self._before(request)
        request = request.following(before)
        echo, warms_up = request.echo(), self._chain is not None and self._chain.is_warm_up
        # A conversation gets its items from the stored response when that has ended. A warm-up adds none.
        is_stored = may_store and (request.is_stored or (joined is not None and not warms_up))
        if warms_up:
            request, echo = request.for_warm_up(), warm_up_echo(echo)
        items = before + await self._resolved(request.items, before)
        if joined is not None:
            items = with_own_ids(items)
        await read_images(request.items, before, renderer)
        if joined is not None:
            set_images(before, await joined.files(digests_of(before)))
        elif before:
            await self._load_images(request.previous, before)
        conversation = self._written(request, items) if is_stored else b""
        try:
            if request.compacts:
                call = await compacting_call(request, items, limits, renderer, echo)
            else:
                call = await fitting_call(request, items, limits, renderer, echo)
            most = request.compact_threshold
            is_long = may_store and not request.compacts and not warms_up and 0 < most < call.about.prompt_tokens
            if self._summarise and is_long and not (self._is_repeated and await self._is_repeated()):
                call = await compacted_call(self._summarise, body, request, items, limits, renderer, call)
        except InvalidRequest as error:
            raise _renamed(request.renamed(error)) from error
        if joined is not None and may_store and not warms_up:
            call = replace(call, joins=(joined.id, joined.version))
        if self._chain is not None and not request.is_stored:
            self._chain.begin(items, files_of(items))
        return replace(
            request.with_loosened(call),
            retention_s=self._storage.retention_s if is_stored else 0,
            conversation=await packed(conversation) if is_stored else b"",
            # Also those of items that were left out of the prompt: the conversation names them.
            files=files_of(items) if is_stored else call.files,
            chain=items[0]["id"] if items and (is_stored or request.previous) else "",
        )

    async def read_compaction(
        self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer
    ) -> tuple[list[Item], Call]:
        """Return the items that a body of /v1/responses/compact names, and the call that asks for their summary.

        Raises ApiError.
        """
        request = read_compact_request(body, limits, renderer)
        before, _ = await self._before(request)
        request = request.following(before)
        items = before + await self._resolved(request.items, before)
        if not items:
            raise refused("input", "input is empty: there is nothing to compact.")
        await read_images(request.items, before, renderer)
        if before:
            await self._load_images(request.previous, before)
        try:
            return items, await read_summary(body, items, limits, renderer, request.call.no_effect)
        except InvalidRequest as error:
            raise _renamed(error) from error

    async def _before(self, request: ResponseRequest) -> tuple[list[Item], JoinedConversation | None]:
        """Return the items before the input, whose images have no files yet. Raises ApiError."""
        if request.previous:
            known = await self._chain.before(request.previous) if self._chain is not None else None
            # A warm-up without input has no items.
            return await self.store.whole_conversation(request.previous) if known is None else known, None
        if not request.conversation_id:
            return [], None
        if self._conversations is None:
            raise refused("conversation", "conversation is not supported here; send the items in input.")
        joined = await self._conversations.join(request.conversation_id)
        return joined.items, joined

    async def _load_images(self, previous: str, before: Sequence[Item]) -> None:
        """Give the images of the conversation of the previous response their files. Raises ApiError."""
        if self._chain is not None and self._chain.knows(previous):
            self._chain.set_images(before)
        else:
            await self.store.load_images(previous, before)

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
        name = "previous_response_id" if request.previous else "conversation" if request.conversation_id else "input"
        check_stored(name, stored := stored_items(items))
        data = json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode()
        limit = self._storage.conversation_bytes
        if len(data) > limit:
            raise refused(
                name,
                f"{name} makes a conversation of {len(data)} bytes; at most {limit} are stored (this server's setting "
                "--max-conversation-bytes). Send store: false, or begin a new conversation.",
            )
        return data


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
