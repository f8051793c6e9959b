"""/v1/conversations: create, read, change and delete conversations and their items; and what responses need of them.

A response that continues a conversation names it in its submission, which locks it in the same step. At the end of the
response its items are in Redis: the stored conversation before the answer, and the output log. The next reader of the
conversation adds them in one step that also unlocks it (`settled`), so any process may die before that.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from aiohttp import web

from quire.gateway.admission.submission import memory_is_full
from quire.gateway.api.body_budget import hold_body
from quire.gateway.api.caller import caller_of
from quire.gateway.api.paging import PageQuery
from quire.gateway.api.parameters import read
from quire.gateway.api.parsing import read_object
from quire.gateway.api.responses.images import (
    check_stored,
    digests_of,
    files_of,
    read_images,
    shown_bytes,
    shown_digests,
    shown_items,
    stored_items,
)
from quire.gateway.api.responses.items import MAX_ITEMS, Item, with_own_ids
from quire.gateway.api.responses.query import index_of, read_item, read_page, shows_images
from quire.gateway.api.responses.store import DIALECT, ResponseStore, output_of
from quire.gateway.api.resume import read_call_id
from quire.gateway.errors.api_errors import BrokerDown, NotFound, conversation_locked, refused
from quire.gateway.features.conversations.conversation_parameters import (
    ADD,
    ANSWERS,
    BODIES,
    CONVERSATION,
    CREATE,
    PARAMETERS,
    UPDATE,
)
from quire.gateway.serving import calls
from quire.gateway.serving.service import Gateway
from quire.gateway.stream.writer import write_body
from quire.shared.protocol.broker import FilesLost, KeptConversation, NoRoom, new_id

__all__ = ["ANSWERS", "BODIES", "CONVERSATION", "PARAMETERS", "ConversationStore", "settled", "write_page"]

# Attempts to change a conversation that others change at the same time.
ATTEMPTS = 16


async def settled(gateway: Gateway, conversation_id: str) -> KeptConversation | None:
    """Return a conversation with the items of its response, if that has ended; None if there is none.

    The items of a response that failed, was cancelled or was deleted are not added. Raises BrokerDown.
    """
    broker = gateway.broker
    for _ in range(ATTEMPTS):
        kept = await gateway.retry(partial(broker.read_conversation, conversation_id))
        if kept is None or not kept.open or (ended := await _ended(gateway, kept)) is None:
            return kept
        after, digests = ended
        write = partial(broker.write_conversation, after, new_id(), gateway.settings.response_retention_s)
        try:
            await gateway.retry(partial(write, dict.fromkeys(digests)))
        except FilesLost:
            # Redis has lost data. The items stay; a call that needs the images is told that they are gone.
            await gateway.retry(partial(write, {}))
    raise _busy()


async def _ended(gateway: Gateway, kept: KeptConversation) -> tuple[KeptConversation, list[str]] | None:
    """Return a conversation after the end of its response, and the digests of its images; None if that still runs."""
    store = ResponseStore(found := calls.stored_calls(gateway, kept.owner), gateway.model)
    call = await found.look_up(kept.open, DIALECT)
    if call is not None and not call.is_done:
        return None
    items: list[Item] | None = None
    if call is not None and (response := await store.read_call(kept.open, call)).error is None:
        try:
            items = await store.conversation(kept.open) + output_of(response)
            kept = replace(kept, scope=await store.scope(kept.open), items=await _packed(items))
        except NotFound:  # deleted meanwhile
            items = None
    if items is None:
        items = await _items(kept)
    return replace(kept, open=""), digests_of(items)


async def _items(kept: KeptConversation) -> list[Item]:
    items: list[Item] = json.loads(await asyncio.to_thread(zlib.decompress, kept.items))
    return items


def _json(items: Sequence[Item]) -> bytes:
    return json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode()


async def _packed(items: Sequence[Item]) -> bytes:
    return await asyncio.to_thread(zlib.compress, _json(items), 1)


def _busy() -> BrokerDown:
    return BrokerDown("The conversation is changed by others all the time. Send the call again.")


@dataclass(slots=True)
class Joined:
    """A conversation that a response continues (`JoinedConversation`)."""

    id: str
    version: str
    items: list[Item]
    files: Callable[[Iterable[str]], Awaitable[dict[str, bytes]]]


class ConversationStore:
    """The conversations of one owner at one model."""

    def __init__(self, gateway: Gateway, owner: str, is_repeated: Callable[[], Awaitable[bool]] | None = None) -> None:
        """is_repeated: returns whether the call only repeats an earlier one, whose response may still run."""
        self._gateway = gateway
        self._owner = owner
        self._is_repeated = is_repeated

    async def read(self, public_id: str) -> KeptConversation:
        """Return a conversation. Raises NotFound or BrokerDown."""
        conversation_id = read_call_id(public_id, CONVERSATION)
        kept = await settled(self._gateway, conversation_id) if conversation_id else None
        if kept is None or kept.owner != self._owner:
            raise NotFound(
                f"Conversation with id {public_id[:80]!r} not found. It may have expired or belong to another model.",
                param="conversation",
            )
        return kept

    async def join(self, public_id: str) -> Joined:
        """Return a conversation for a response that continues it. Raises ApiError."""
        kept = await self.read(public_id)
        if kept.open and not (self._is_repeated and await self._is_repeated()):
            raise conversation_locked()
        items = await _items(kept)
        if len(items) >= MAX_ITEMS:
            raise refused(
                "conversation", f"conversation has {len(items)} items, the most that it may; begin a new conversation."
            )
        # Redis looks at the key of a repeated call before it looks at the version, which is nobody's.
        return Joined(kept.id, "" if kept.open else kept.version, items, partial(self.files, kept))

    async def files(self, kept: KeptConversation, digests: Iterable[str]) -> dict[str, bytes]:
        """Return files of the images of a conversation by digest. Raises NotFound or BrokerDown."""
        store = ResponseStore(calls.stored_calls(self._gateway, self._owner), self._gateway.model)
        files = await store.files_within(kept.scope, digests)
        if files is None:
            raise NotFound("An image of the conversation is not kept any more.", param="conversation")
        return files

    async def write(
        self, kept: KeptConversation, items: Sequence[Item], files: Mapping[str, bytes], num_before: int = 0
    ) -> bool:
        """Write a conversation with these items. Returns False if others have changed it. Raises ApiError.

        items: as they are stored. files: those of their images that are new. num_before: number of items until now; the
        bounds of a conversation, which an answer may have passed, refuse only more of them.
        """
        gateway, settings = self._gateway, self._gateway.settings
        is_more = len(items) > num_before
        if is_more and (size := len(_json(items))) > settings.max_conversation_bytes:
            raise refused(
                "items",
                f"items make a conversation of {size} bytes; at most {settings.max_conversation_bytes} are stored "
                "(this server's setting --max-conversation-bytes). Begin a new conversation.",
            )
        if is_more and len(items) > MAX_ITEMS:
            raise refused("items", f"A conversation has at most {MAX_ITEMS} items, and would have {len(items)}.")
        if is_more:
            check_stored("items", items)
        new = replace(kept, items=await _packed(items))
        write = partial(gateway.broker.write_conversation, new, new_id(), settings.response_retention_s)
        named: dict[str, bytes | None] = {**dict.fromkeys(digests_of(items)), **files}
        try:
            return await gateway.retry(partial(write, named, gateway.submission.terms.bounds))
        except NoRoom as error:
            raise memory_is_full(error, gateway.submission.terms.bounds) from error
        except FilesLost:
            raise NotFound("An image of the conversation is not kept any more.", param="conversation") from None

    async def change(
        self, public_id: str, change: Callable[[list[Item]], list[Item]], files: Mapping[str, bytes]
    ) -> None:
        """Change the items of a conversation that no response continues. Raises ApiError."""
        for _ in range(ATTEMPTS):
            kept = await self.read(public_id)
            if kept.open:
                raise conversation_locked()
            before = await _items(kept)
            if await self.write(kept, change(before), files, len(before)):
                return
        raise _busy()


def _store(gateway: Gateway, request: web.Request) -> ConversationStore:
    return ConversationStore(gateway, caller_of(request).owner)


def _answer(kept: KeptConversation) -> web.Response:
    return web.json_response(
        {
            "id": CONVERSATION + kept.id,
            "object": "conversation",
            "created_at": kept.created,
            "metadata": json.loads(kept.metadata),
        }
    )


async def _body(gateway: Gateway, request: web.Request) -> dict[str, Any]:
    return await read_object(request, gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)


async def create(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/conversations: creates a conversation of the caller, perhaps with items."""
    given = read(await _body(gateway, request), CREATE)
    items = with_own_ids(given.get("items", []))
    await read_images(items, [], gateway.renderer_for(request))
    kept = KeptConversation(
        id=new_id(),
        owner=caller_of(request).owner,
        created=int(time.time()),
        scope=gateway.key_limits.scope_of(caller_of(request)),
        metadata=json.dumps(dict(given.get("metadata", ()))),
        items=b"",
    )
    await _store(gateway, request).write(kept, stored_items(items), files_of(items))
    return _answer(kept)


async def retrieve(gateway: Gateway, request: web.Request) -> web.Response:
    """GET /v1/conversations/{id}: the conversation, without its items."""
    return _answer(await _store(gateway, request).read(request.match_info["id"]))


async def update(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/conversations/{id}: other metadata."""
    metadata = json.dumps(dict(read(await _body(gateway, request), UPDATE)["metadata"]))
    store = _store(gateway, request)
    for _ in range(ATTEMPTS):
        kept = replace(await store.read(request.match_info["id"]), metadata=metadata)
        items = await _items(kept)
        if await store.write(kept, items, {}, len(items)):
            return _answer(kept)
    raise _busy()


async def delete(gateway: Gateway, request: web.Request) -> web.Response:
    """DELETE /v1/conversations/{id}: deletes a conversation; its responses stay."""
    kept = await _store(gateway, request).read(request.match_info["id"])
    await gateway.retry(partial(gateway.broker.delete_conversation, kept.id))
    return web.json_response({"id": CONVERSATION + kept.id, "object": "conversation.deleted", "deleted": True})


async def list_items(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/{id}/items: the items, in pages."""
    query, store = read_page(request), _store(gateway, request)
    kept = await store.read(request.match_info["id"])
    return await write_page(gateway, request, await _items(kept), query, partial(store.files, kept))


async def add_items(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/{id}/items: adds items at the end, and returns them."""
    items = read(await _body(gateway, request), ADD)["items"]
    store, name = _store(gateway, request), request.match_info["id"]
    await store.read(name)
    await read_images(items, [], gateway.renderer_for(request))
    files, new = files_of(items), stored_items(items)
    added: list[Item] = []

    def change(before: list[Item]) -> list[Item]:
        after = with_own_ids([*before, *new])
        added[:] = after[len(before) :]
        return after

    await store.change(name, change, files)
    query = PageQuery(len(added), "", "asc")

    async def read_files(digests: Iterable[str]) -> dict[str, bytes]:
        return {digest: files[digest] for digest in digests}

    return await write_page(gateway, request, added, query, read_files)


async def retrieve_item(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/{id}/items/{item_id}: one item."""
    shows, store = read_item(request), _store(gateway, request)
    kept = await store.read(request.match_info["id"])
    items = await _items(kept)
    page, files = [items[_place(items, request)]], None
    if shows:
        await hold_body(request, shown_bytes(page), gateway.settings.body_timeout_s)
        files = await store.files(kept, shown_digests(page))
    return web.json_response(shown_items(page, files)[0])


async def delete_item(gateway: Gateway, request: web.Request) -> web.Response:
    """DELETE /v1/conversations/{id}/items/{item_id}: removes one item, and returns the conversation."""
    store, name = _store(gateway, request), request.match_info["id"]

    def change(items: list[Item]) -> list[Item]:
        at = _place(items, request)
        return items[:at] + items[at + 1 :]

    await store.change(name, change, {})
    return _answer(await store.read(name))


def _place(items: Sequence[Item], request: web.Request) -> int:
    """Return the index of the item that the path names. Raises NotFound."""
    name = request.match_info["item_id"]
    for index, item in enumerate(items):
        if item["id"] == name:
            return index
    raise NotFound(f"Item with id {name[:80]!r} not found in this conversation.", param="item_id")


async def write_page(
    gateway: Gateway,
    request: web.Request,
    items: list[Item],
    query: PageQuery,
    read_files: Callable[[Iterable[str]], Awaitable[dict[str, bytes]]],
) -> web.StreamResponse:
    """Write the page of stored items that a query asks for. read_files: returns files of images by digest."""
    if query.order == "desc":
        items.reverse()
    if query.after:
        items = items[index_of(items, query.after) + 1 :]
    page, files, settings = items[: query.limit], None, gateway.settings
    if shows_images(request):
        # An image counts as often as it is shown. The memory counts until the answer is written.
        while len(page) > 1 and shown_bytes(page) > settings.max_body_bytes:
            page.pop()
        await hold_body(request, shown_bytes(page), settings.body_timeout_s)
        files = await read_files(shown_digests(page))
    ends = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    data = (", " * (index > 0) + json.dumps(shown_items([item], files)[0]) for index, item in enumerate(page))
    parts = chain(['{"object": "list", "data": ['], data, ["], " + json.dumps(ends)[1:]])
    return await write_body(request, parts, gateway.meters, settings.write_timeout_s)
