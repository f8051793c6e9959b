"""The records of files in Redis, and their content in the storage."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from quire.gateway.features.batches.files.storage import Storage
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.broker.scripts import load_script
from quire.shared.protocol.keys import UPLOAD_LEASE_S, BatchKeys

PREFIX = "file-"
BATCH, BATCH_OUTPUT, VISION, USER_DATA = "batch", "batch_output", "vision", "user_data"
PURPOSES = (BATCH, BATCH_OUTPUT, VISION, USER_DATA)
# Purposes of the files that clients upload, and of those that a call may name as images.
UPLOADED = (BATCH, VISION, USER_DATA)
OF_IMAGES = (VISION, USER_DATA)

_FIELDS = ("owner", "filename", "purpose", "bytes", "created", "expires", "complete")
_HEXADECIMAL = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StorageBounds:
    """Bounds in bytes: of one file, of all files of an owner (0 for none of their own), and of all files."""

    file: int
    owner: int
    all: int


class UploadLost(Exception):
    """Redis has no record of an upload: its lease has ended, or data of Redis were lost."""


class StorageFull(Exception):
    """The files of an owner, or all files, take as much as they may. whose: `owner` or `all`."""

    def __init__(self, whose: str, taken: int) -> None:
        super().__init__(f"{whose}: {taken} bytes")
        self.whose = whose
        self.taken = taken


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a complete file. expires: unix seconds; 0 for never."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created: int
    expires: int

    def shown(self) -> dict[str, Any]:
        """Return the File object of the API."""
        return {
            "id": PREFIX + self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": self.expires or None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list: ids in order, and whether more follow."""

    ids: tuple[str, ...]
    has_more: bool


def new_file_id() -> str:
    """Return 128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def read_id(public_id: str, prefix: str) -> str:
    """Return the id in Redis from the one that clients see; empty if it is none."""
    file_id = public_id.removeprefix(prefix)
    return file_id if public_id.startswith(prefix) and _HEXADECIMAL.fullmatch(file_id) else ""


class FileStore:
    """All files. Raises redis-py's RedisError or OSError when Redis fails, and StorageError when the storage fails."""

    def __init__(self, client: Redis, storage: Storage, bounds: StorageBounds) -> None:
        """client: made for the lane BATCHES_TAG."""
        self.client = client
        self.keys = BatchKeys()
        self.storage = storage
        self.bounds = bounds
        self._write_file = load_script(client, "write_file")
        self._delete_file = load_script(client, "delete_file")

    async def reserve(
        self, file_id: str, owner: str, size: int, announced: int = 0, *, has_begun: bool = False
    ) -> None:
        """Reserve bytes for an upload until its lease ends, or renew it. Raises StorageFull and UploadLost.

        announced: bytes that are not reserved, but must be free now.
        """
        await self._write(file_id, owner, size, announced, life_s=UPLOAD_LEASE_S, is_new=not has_begun)

    async def complete(
        self, file_id: str, owner: str, size: int, life_s: int, *, filename: str, purpose: str
    ) -> StoredFile:
        """Make an uploaded file known, with the bytes that it has. Raises StorageFull and UploadLost.

        life_s: seconds until it is deleted; 0 for never.
        """
        fields = {"filename": filename, "purpose": purpose}
        await self._write(file_id, owner, size, life_s=life_s, is_complete=True, fields=fields)
        file = await self.get(file_id, owner)
        if file is None:
            raise ConnectionError("Redis has lost the record of a file")
        return file

    async def _write(
        self,
        file_id: str,
        owner: str,
        size: int,
        announced: int = 0,
        *,
        life_s: int,
        is_complete: bool = False,
        is_new: bool = False,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        args: list[Any] = [self.keys.prefix, file_id, owner, size, self.bounds.owner, self.bounds.all]
        args += [
            "1" if is_complete else "",
            life_s,
            announced,
            "" if is_new else "1",
            *(part for item in (fields or {}).items() for part in item),
        ]
        reply = await self._write_file(keys=[self.keys.file(file_id)], args=args)
        if text(reply[0]) == "full":
            raise StorageFull(text(reply[1]), int(reply[2]))
        if text(reply[0]) == "lost":
            raise UploadLost(file_id)

    async def get(self, file_id: str, owner: str) -> StoredFile | None:
        """Return a complete file of an owner; None if there is none."""
        values = [text(value or b"") for value in await self.client.hmget(self.keys.file(file_id), *_FIELDS)]
        fields = dict(zip(_FIELDS, values, strict=True))
        if fields["complete"] != "1" or fields["owner"] != owner:
            return None
        numbers = (int(fields[name] or 0) for name in ("bytes", "created", "expires"))
        return StoredFile(file_id, owner, fields["filename"], fields["purpose"], *numbers)

    async def page(self, owner: str, limit: int, after: str, *, oldest_first: bool) -> Page | None:
        """Return a page of the complete files of an owner; None if `after` is not one of them."""
        return await read_page(self.client, self.keys.files(owner), limit, after, oldest_first=oldest_first)

    async def parts(self, file_id: str) -> list[tuple[str, int]]:
        """Return name and size of the objects of a file in order."""
        parts: Any = await self.client.hgetall(self.keys.parts(file_id))
        ordered = sorted((int(index), text(value).split(" ")) for index, value in parts.items())
        return [(name, int(size)) for _, (name, size) in ordered]

    async def delete(self, file_id: str, owner: str, *, only_expired: bool = False) -> str:
        """Delete a file: record, then content. Returns `deleted`, `used`, `unknown` or, with `only_expired`, `kept`."""
        args: list[Any] = [self.keys.prefix, file_id, owner, "1" if only_expired else ""]
        reply = text(await self._delete_file(keys=[self.keys.file(file_id)], args=args))
        if reply == "deleted":
            await self.remove_content(file_id)
        return reply

    async def drop(self, file_id: str, owner: str) -> None:
        """Delete an upload that has failed: record and content."""
        if await self.delete(file_id, owner) == "unknown":
            await self.remove_content(file_id)

    async def remove_content(self, file_id: str) -> None:
        """Delete the objects of a file whose record is deleted."""
        await self.storage.delete(file_id)
        await self.client.srem(self.keys.doomed, file_id)


async def read_page(client: Redis, key: str, limit: int, after: str, *, oldest_first: bool) -> Page | None:
    """Return the members of a sorted set behind `after`; None if `after` is not one of them."""
    start = 0
    if after:
        rank: Any = await (client.zrank(key, after) if oldest_first else client.zrevrank(key, after))
        if rank is None:
            return None
        start = int(rank) + 1
    stop = start + limit
    members = await (client.zrange(key, start, stop) if oldest_first else client.zrevrange(key, start, stop))
    ids = [text(member) for member in members]
    return Page(tuple(ids[:limit]), len(ids) > limit)
