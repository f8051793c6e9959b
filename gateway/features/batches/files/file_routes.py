"""The endpoints below /v1/files: upload, list, show, download and delete files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from aiohttp import hdrs, web

from quire.gateway.api.body_budget import hold_body
from quire.gateway.api.caller import caller_of
from quire.gateway.errors.api_errors import ApiError, FileInUse, StorageDown, StorageIsFull, refused
from quire.gateway.features.batches.batch_parameters import FILES_QUERY
from quire.gateway.features.batches.files.file_service import FileService, not_found, storage_down
from quire.gateway.features.batches.files.file_store import (
    PREFIX,
    PURPOSES,
    VISION,
    StorageFull,
    UploadLost,
    new_file_id,
    read_id,
)
from quire.gateway.features.batches.files.reservation import Reservation, ReservedWriter
from quire.gateway.features.batches.files.storage import WHOLE, StorageError
from quire.gateway.features.batches.files.upload import UploadReader
from quire.gateway.serving.service import GatewayProcess
from quire.shared.config.validators import shown

T = TypeVar("T")

PATH = "/v1/files"


class FileRoutes:
    """Handlers of one gateway process. A caller finds only the files that its key has made."""

    def __init__(self, files: FileService, process: GatewayProcess) -> None:
        self._files = files
        self._settings = process.settings
        self._images = process.images

    def routes(self) -> list[web.RouteDef]:
        """Return the routes. Without a storage each answers with the error that names the setting."""
        file_path = f"{PATH}/{{id}}"
        return [
            web.post(PATH, self.upload),
            web.get(PATH, self.all, allow_head=False),
            web.get(file_path, self.show, allow_head=False),
            web.get(f"{file_path}/content", self.content, allow_head=False),
            web.delete(file_path, self.delete),
        ]

    async def upload(self, request: web.Request) -> web.Response:
        """POST /v1/files: stores the file in the form of the body."""
        store, settings, owner = self._files.store, self._settings, caller_of(request).owner
        reader = UploadReader(request, settings.max_file_bytes, settings.body_timeout_s)
        file_id = new_file_id()
        is_complete = False
        try:
            # 1) Reserve bytes: uploads at the same time share the bounds.
            reservation = Reservation(store, self._in_bounds, file_id, owner, reader.most)
            await reservation.begin()
            async with reservation.renewing():
                # 2) Write the content, and reserve more bytes as they arrive.
                written = await self._files.write(
                    file_id, lambda writer: reader.read(ReservedWriter(writer, reservation))
                )
                if written.purpose == VISION:
                    await self._check_picture(request, file_id, written.size)
                # 3) Make the file known, with its real size.
                life_s = written.expires_s or settings.file_retention_s
                complete = partial(store.complete, filename=written.filename, purpose=written.purpose)
                stored = await self._in_bounds(partial(complete, file_id, owner, written.size, life_s))
            is_complete = True
        finally:
            if not is_complete:
                await asyncio.shield(self._drop(file_id, owner))
        return web.json_response(stored.shown())

    async def _check_picture(self, request: web.Request, file_id: str, size: int) -> None:
        """Check that the content of an upload is an image. Raises ApiError."""
        try:
            await hold_body(request, min(size, self._settings.max_image_bytes), self._settings.body_timeout_s)
            await self._images.check_file(size, self._files.store.storage.read(file_id, WHOLE, 0, size))
        except StorageError as error:
            raise storage_down(error) from error

    async def all(self, request: web.Request) -> web.Response:
        """GET /v1/files: the files of the caller in pages, the newest first."""
        store, owner = self._files.store, caller_of(request).owner
        query = FILES_QUERY.read(request)
        purpose = query.more.get("purpose", "")
        if purpose and purpose not in PURPOSES:
            raise refused("purpose", f"purpose must be {' or '.join(PURPOSES)}, not {shown(purpose)}.")
        after, has_more = read_id(query.after, PREFIX) or "-" if query.after else "", True
        data: list[dict[str, Any]] = []
        while has_more and len(data) <= query.limit:
            page = await self._files.retry(
                partial(store.page, owner, query.limit + 1, after, oldest_first=query.order == "asc")
            )
            if page is None:
                raise refused("after", f"after names no file: {shown(query.after)}.")
            for file_id in page.ids:
                after = file_id
                file = await self._files.retry(partial(store.get, file_id, owner))
                if file is not None and purpose in ("", file.purpose):
                    data.append(file.shown())
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
        file = await self._files.find(request.match_info["id"], caller_of(request).owner)
        return web.json_response(file.shown())

    async def content(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{id}/content: the content, piece by piece."""
        file = await self._files.find(request.match_info["id"], caller_of(request).owner)
        response = web.StreamResponse(
            headers={
                hdrs.CONTENT_TYPE: "application/octet-stream",
                hdrs.CONTENT_LENGTH: str(file.bytes),
                hdrs.CONTENT_DISPOSITION: f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
            }
        )
        pieces = self._files.content(file)
        # The first piece is read before the head is written, so that a storage that is away gives an error.
        data: bytes | None = await anext(pieces, None)
        await response.prepare(request)
        try:
            while data is not None:
                await self._in_time(request, response.write(data))
                data = await anext(pieces, None)
            await self._in_time(request, response.write_eof())
        except ApiError as error:
            raise ConnectionResetError("the storage failed in the middle of a file") from error
        return response

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/files/{id}: deletes a file, unless a batch that has not ended reads it."""
        public_id = request.match_info["id"]
        file = await self._files.find(public_id, caller_of(request).owner)
        reply = await self._files.delete(file.id, file.owner)
        if reply == "used":
            raise FileInUse("A batch that has not ended reads this file; wait for its end, or cancel it.", param="id")
        if reply == "unknown":
            raise not_found(public_id)
        return web.json_response({"id": public_id, "object": "file", "deleted": True})

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
        except UploadLost as error:
            raise StorageDown("The record of the upload was lost; send the file again.") from error

    async def _drop(self, file_id: str, owner: str) -> None:
        """Delete an upload that failed. If Redis is away, it is deleted when its lease ends."""
        with suppress(ApiError, StorageError):
            await self._files.retry(partial(self._files.store.drop, file_id, owner))

    async def _in_time(self, request: web.Request, written: Awaitable[None]) -> None:
        """Wait for a slow client, for the write timeout at most; then close its connection."""
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await written
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client has not read for too long") from None
