"""The conversation of the last response of a connection, for calls with `store: false`.

Nothing of it is stored: it ends with its connection, or when other connections need the memory.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from quire.gateway.api.responses.images import set_images, stored_items
from quire.gateway.api.responses.items import Item


@dataclass(frozen=True, slots=True)
class _Kept:
    """The items up to the end of a response, compressed. files: of their images by digest."""

    response_id: str
    items: bytes
    json_bytes: int
    files: Mapping[str, bytes]

    @property
    def size(self) -> int:
        return len(self.items) + sum(map(len, self.files.values()))


class ChainMemory:
    """The memory of all chains of a process. The chain that was used least recently is dropped for a new one."""

    def __init__(self, size: int, conversation_bytes: int) -> None:
        """conversation_bytes: the largest JSON of one conversation; a longer one is not kept."""
        self._size = size
        self.conversation_bytes = conversation_bytes
        self._sizes: OrderedDict[Chain, int] = OrderedDict()
        self._held = 0

    def keep(self, chain: Chain, size: int) -> None:
        """Count a chain, with a size of 0 no more."""
        self._held += size - self._sizes.pop(chain, 0)
        if size:
            self._sizes[chain] = size
        while self._held > self._size:
            next(iter(self._sizes)).forget()


@dataclass(eq=False, slots=True)
class Chain:
    """The chain of one connection: its last response that is not stored, with all items before."""

    memory: ChainMemory
    # True if the running call only computes its prompt (`generate: false`).
    is_warm_up: bool = False
    _kept: _Kept | None = None
    # Items before the answer of the running response, and the files of their images; None if it is stored.
    _begun: tuple[list[Item], Mapping[str, bytes]] | None = None
    _last: str = ""

    def knows(self, response_id: str) -> bool:
        """Return True if the conversation of this response is kept."""
        return self._kept is not None and self._kept.response_id == response_id

    async def before(self, response_id: str) -> list[Item] | None:
        """Return the items up to the end of a response; None if it is not kept."""
        if self._kept is None or not self.knows(response_id):
            return None
        items: list[Item] = json.loads(await asyncio.to_thread(zlib.decompress, self._kept.items))
        return items

    def set_images(self, items: Sequence[Item]) -> None:
        """Give the images of `before` their files."""
        if self._kept is not None:
            set_images(items, self._kept.files)

    def begin(self, items: Sequence[Item], files: Mapping[str, bytes]) -> None:
        """Note the items before the answer of a response that is not stored. The images of the items were read."""
        self._begun = stored_items(items), files

    def end(self, event: str) -> None:
        """Note the JSON of the last event of the response."""
        self._last = event

    async def settle(self) -> None:
        """Keep the conversation of the response that has ended, with its output."""
        begun, event, self._begun, self._last = self._begun, self._last, None, ""
        if begun is not None and event:
            kept = await asyncio.to_thread(_kept_of, *begun, event)
            if kept.json_bytes <= self.memory.conversation_bytes:
                self._kept = kept
                self.memory.keep(self, kept.size)

    def forget(self) -> None:
        """Keep nothing of the responses that have ended."""
        self._kept = None
        self.memory.keep(self, 0)


def _kept_of(items: list[Item], files: Mapping[str, bytes], event: str) -> _Kept:
    response = json.loads(event)["response"]
    data = json.dumps([*items, *response["output"]], ensure_ascii=False, separators=(",", ":")).encode()
    return _Kept(response["id"], zlib.compress(data, 1), len(data), files)


# The chain of the connection over which a call came.
CHAIN = web.RequestKey("chain", Chain)
