"""The verbs about conversations of the API, which responses continue one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
from redis.asyncio import Redis

from quire.shared.protocol.admission import QueueBounds
from quire.shared.protocol.broker.gateway import ROOM_ATTEMPTS, FilesLost, NoRoom
from quire.shared.protocol.broker.lane import Lane, text
from quire.shared.protocol.keys import image_name
from quire.shared.protocol.states import RequestState

_FIELDS = ("version", "open", "owner", "created", "scope", "metadata", "items")


@dataclass(frozen=True, slots=True)
class KeptConversation:
    """A conversation as Redis has it.

    version: changes with every write; empty for a record that is not written yet. open: the response that continues it,
    and whose items are not added yet; empty for none. created: unix seconds. scope: of the names of its images, as in
    `image_name`. metadata: JSON. items: compressed JSON.
    """

    id: str
    owner: str
    created: int
    scope: str
    metadata: str
    items: bytes
    version: str = ""
    open: str = ""


class ConversationVerbs(Lane):
    """The verbs about conversations of the API."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._write_conversation = self.script("write_conversation")
        self._delete_conversation = self.script("delete_conversation")

    async def read_conversation(self, conversation_id: str) -> KeptConversation | None:
        """Return a conversation; None if there is none."""
        fields: Any = await self.client.hmget(self.keys.kept_conversation(conversation_id), *_FIELDS)
        version, is_open, owner, created, scope, metadata, items = fields
        if version is None or items is None:
            return None
        return KeptConversation(
            conversation_id,
            text(owner),
            int(created),
            text(scope),
            text(metadata),
            items,
            text(version),
            text(is_open),
        )

    async def write_conversation(
        self,
        new: KeptConversation,
        version: str,
        retention_s: int,
        files: Mapping[str, bytes | None],
        bounds: QueueBounds | None = None,
    ) -> bool:
        """Write a conversation in place of the version that the caller has read. Returns False if that has changed.

        version: of the new record, random. Repeat the call with the same one after a lost reply: with another one the
        caller would find its own record as a change of somebody else's.
        retention_s: life of the record from now on. files: of all its images by digest; None for one that Redis has.
        bounds: of the memory of what stays; None never refuses. Raises NoRoom or FilesLost.
        """
        terms = {
            "version": version,
            "before": new.version,
            "open": new.open,
            "owner": new.owner,
            "retention_s": retention_s,
            "images": [image_name(new.scope, digest) for digest in files],
            "fields": {
                "owner": new.owner,
                "created": str(new.created),
                "scope": new.scope,
                "metadata": new.metadata,
                "items": new.items,
            },
        }
        if bounds is not None:
            terms |= {"max_stored": bounds.stored_bytes, "max_key_stored": bounds.key_bytes}
        keys = [self.keys.kept_conversation(new.id)]
        args = [
            self.keys.prefix,
            new.id,
            msgpack.packb(terms, use_bin_type=False),
            *(file or b"" for file in files.values()),
        ]
        for _ in range(ROOM_ATTEMPTS):
            reply = await self._write_conversation(keys=keys, args=args)
            found = text(reply[0])
            if found != "no_room" or int(reply[3]):
                break
        if found == "no_room":
            raise NoRoom(new.owner if text(reply[1]) == "key" else "", int(reply[2]), int(reply[3]))
        if found == "no_files":
            raise FilesLost(new.id)
        return found == "written"

    async def delete_conversation(self, conversation_id: str) -> bool:
        """Delete a conversation. Returns False if there is none."""
        keys = [self.keys.kept_conversation(conversation_id)]
        return bool(await self._delete_conversation(keys=keys, args=[self.keys.prefix, conversation_id]))

    async def answered_conversations(self) -> list[str]:
        """Return the conversations whose response has ended, or is gone, without its items being added."""
        names = [text(name) for name in await self.client.smembers(self.keys.answering)]
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hget(self.keys.kept_conversation(name), "open")
        responses = await pipe.execute()
        for response in responses:
            pipe.hget(self.keys.request(text(response or b"")), "state")
        states = await pipe.execute()
        running = {RequestState.QUEUED, RequestState.RUNNING, RequestState.PARKED}
        return [name for name, state in zip(names, states, strict=True) if text(state or b"") not in running]
