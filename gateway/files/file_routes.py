"""The endpoints below /v1/files: upload, list, show, download and delete files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from aiohttp import hdrs, web
from redis.exceptions import RedisError

from quire.gateway.admission.retry import down
from quire.gateway.api.caller import caller_of
from quire.gateway.api.errors import FileInUse, NotFound, StorageDown, StorageIsFull, refused
from quire.gateway.api.paging import read_page_query
from quire.gateway.files.file_service import FileService
from quire.gateway.files.file_store import PREFIX, PURPOSES, WHOLE, StorageFull, StoredFile, new_file_id, read_id
from quire.gateway.files.storage import StorageError
from quire.gateway.files.upload import UploadReader
from quire.gateway.settings import GatewaySettings
from quire.shared.validators import shown

T = TypeVar("T")

PATH = "/v1/files"
DEFAULT_PAGE, MAX_PAGE = 100, 1000


class FileRoutes:
    """Handlers of one gateway process. A caller finds only the files that its key has made."""

    def __init__(self, files: FileService, settings: GatewaySettings) -> None:
        self._files = files
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        """Return the routes. Without a storage each answers with the error that names the setting."""
        one = f"{PATH}/{{id}}"
        return [
            web.post(PATH, self.upload),
            web.get(PATH, self.all, allow_head=False),
            web.get(one, self.show, allow_head=False),
            web.get(f"{one}/content", self.content, allow_head=False),
            web.delete(one, self.delete),
        ]

    async def upload(self, request: web.Request) -> web.Response:
        """POST /v1/files: stores the file in the form of the body."""
        store, settings, owner = self._files.store, self._settings, caller_of(request).owner
        reader = UploadReader(request, settings.max_file_bytes, settings.body_timeout_s)
        file_id = new_file_id()
        is_complete = False
        try:
            # 1) Reserve the largest size that the content can have: uploads at the same time share the bounds.
            await self._in_bounds(partial(store.reserve, file_id, owner, reader.most, int(time.time())))
            # 2) Write the content.
            try:
                async with store.storage.writing(file_id, WHOLE) as writer:
                    found = await reader.read(writer)
            except StorageError as error:
                raise storage_down(error) from error
            # 3) Make the file known, with its real size.
            expires_s = found.expires_s or settings.file_retention_s
            expires = int(time.time()) + expires_s if expires_s else 0
            stored = await self._in_bounds(
                partial(
                    store.complete,
                    file_id,
                    owner,
                    found.size,
                    expires,
                    filename=found.filename,
                    purpose=found.purpose,
                )
            )
            is_complete = True
        finally:
            if not is_complete:
                await asyncio.shield(self._drop(file_id, owner))
        return web.json_response(stored.shown())

    async def all(self, request: web.Request) -> web.Response:
        """GET /v1/files: the files of the caller in pages, the newest first."""
        store, owner = self._files.store, caller_of(request).owner
        query = read_page_query(request, DEFAULT_PAGE, MAX_PAGE, more=("purpose", "order"))
        purpose, order = query.more.get("purpose", ""), query.more.get("order", "desc")
        if purpose and purpose not in PURPOSES:
            raise refused("purpose", f"purpose must be {' or '.join(PURPOSES)}, not {shown(purpose)}.")
        if order not in ("asc", "desc"):
            raise refused("order", f"order must be asc or desc, not {shown(order)}.")
        after, has_more = self._id(query.after) if query.after else "", True
        data: list[dict[str, Any]] = []
        while has_more and len(data) <= query.limit:
            page = await self._files.retry(
                partial(store.page, owner, query.limit + 1, after, oldest_first=order == "asc")
            )
            if page is None:
                raise refused("after", f"after names no file: {shown(query.after)}.")
            for file_id in page.ids:
                after = file_id
                found = await self._files.retry(partial(store.get, file_id, owner))
                if found is not None and purpose in ("", found.purpose):
                    data.append(found.shown())
            has_more = page.has_more
        shown_page = data[: query.limit]
        return web.json_response(
            {
                "object": "list",
                "data": shown_page,
                "first_id": shown_page[0]["id"] if shown_page else None,
                "last_id": shown_page[-1]["id"] if shown_page else None,
                "has_more": len(data) > query.limit,
            }
        )

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/files/{id}: one file."""
        return web.json_response((await self._find(request)).shown())

    async def content(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{id}/content: the content, piece by piece."""
        store = self._files.store
        found = await self._find(request)
        parts = await self._files.retry(partial(store.parts, found.id))
        response = web.StreamResponse(
            headers={
                hdrs.CONTENT_TYPE: "application/octet-stream",
                hdrs.CONTENT_LENGTH: str(sum(size for _, size in parts)),
                hdrs.CONTENT_DISPOSITION: f"attachment; filename*=UTF-8''{quote(found.filename, safe='')}",
            }
        )
        pieces = store.content(found.id, parts)
        try:
            # The first piece is read before the head is written, so that a storage that is away gives an error.
            data: bytes | None = await anext(pieces, None)
            await response.prepare(request)
            while data is not None:
                await self._in_time(request, response.write(data))
                data = await anext(pieces, None)
            await self._in_time(request, response.write_eof())
        except StorageError as error:
            if response.prepared:
                raise ConnectionResetError("the storage failed in the middle of a file") from error
            raise storage_down(error) from error
        return response

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/files/{id}: deletes a file, unless a batch that has not ended reads it."""
        store, owner = self._files.store, caller_of(request).owner
        public_id = request.match_info["id"]
        try:
            reply = await self._files.retry(partial(store.delete, self._id(public_id), owner))
        except StorageError:
            reply = "deleted"  # the record is gone; the content is deleted once the storage answers
        if reply == "used":
            raise FileInUse("A batch that has not ended reads this file; wait for its end, or cancel it.", param="id")
        if reply == "unknown":
            raise not_found(public_id)
        return web.json_response({"id": public_id, "object": "file", "deleted": True})

    async def _find(self, request: web.Request) -> StoredFile:
        public_id = request.match_info["id"]
        store, owner = self._files.store, caller_of(request).owner
        found = await self._files.retry(partial(store.get, self._id(public_id), owner))
        if found is None:
            raise not_found(public_id)
        return found

    def _id(self, public_id: str) -> str:
        if not (found := read_id(public_id, PREFIX)):
            raise not_found(public_id)
        return found

    async def _in_bounds(self, command: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._files.retry(command)
        except StorageFull as error:
            name = "--max-key-file-bytes" if error.whose == "owner" else "--max-stored-file-bytes"
            whose = "Your files" if error.whose == "owner" else "The files of this server"
            raise StorageIsFull(
                f"{whose} take {error.taken} bytes, and with this one they would take more than the server's setting "
                f"{name} allows. Delete files that are not needed."
            ) from error

    async def _drop(self, file_id: str, owner: str) -> None:
        """Delete an upload that failed. If Redis is away, it is deleted when its reservation expires."""
        try:
            await self._files.store.delete(file_id, owner)
        except (RedisError, OSError, StorageError) as error:
            down(f"an upload that failed cannot be deleted: {error}")

    async def _in_time(self, request: web.Request, written: Awaitable[None]) -> None:
        """Wait for a slow client, for the write timeout at most; then close its connection."""
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await written
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client has not read for too long") from None


def not_found(public_id: str) -> NotFound:
    """Return the error for a file that the caller does not have. It hides whether others have it."""
    return NotFound(f"No such File object: {public_id[:80]}.", param="id")


def storage_down(error: StorageError) -> StorageDown:
    """Return the error for a storage that cannot be reached; the log has the reason."""
    down(f"the storage of files fails: {error}")
    return StorageDown("The storage of files cannot be used now. Try again later.", headers={"Retry-After": "5"})
