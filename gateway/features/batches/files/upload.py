"""Reads the multipart body of POST /v1/files: the content goes to the storage piece by piece, never into memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import BodyPartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from quire.gateway.errors.api_errors import (
    BodyTimeout,
    FileTooLarge,
    InvalidRequest,
    UnsupportedMedia,
    of_check,
    refused,
)
from quire.gateway.features.batches.batch_parameters import ANCHOR, MAX_EXPIRY_S, MIN_EXPIRY_S, SECONDS, expiry_s
from quire.gateway.features.batches.files.file_store import UPLOADED
from quire.gateway.features.batches.files.storage import CHUNK, ObjectWriter
from quire.shared.config.validators import InvalidValue, shown

T = TypeVar("T")

MAX_FILENAME = 255
# Bytes of the value of a field that is no file, and bytes around the content that a body may have.
MAX_FIELD_BYTES = 256
OVERHEAD_BYTES = 64 * 1024
FIELDS = ("purpose", ANCHOR, SECONDS)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(slots=True)
class Upload:
    """The fields of the body of an upload. size: of the content. expires_s: 0 without `expires_after`."""

    filename: str = ""
    purpose: str = ""
    size: int = 0
    expires_s: int = 0


class UploadReader:
    """Reads one upload. The parts of the body may come in any order."""

    def __init__(self, request: web.Request, max_bytes: int, timeout_s: float) -> None:
        """timeout_s: for each piece of the body. Raises ApiError for a body that is no form or too large."""
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
            raise UnsupportedMedia("A body with a Content-Encoding is not accepted; send it as it is.")
        if request.content_type != "multipart/form-data":
            raise UnsupportedMedia(
                "The body must be a form with the fields `purpose` and `file`; send it as multipart/form-data."
            )
        if (request.content_length or 0) > max_bytes + OVERHEAD_BYTES:
            raise too_large(max_bytes)
        self._request = request
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._fields: dict[str, str] = {}

    @property
    def most(self) -> int:
        """The largest size that the content can have, as far as it is known before it is read."""
        length = self._request.content_length
        return self._max_bytes if length is None else min(self._max_bytes, length)

    async def read(self, writer: ObjectWriter) -> Upload:
        """Read the body to its end, and write the content. Raises ApiError and StorageError."""
        upload, has_file = Upload(), False
        try:
            form = await self._request.multipart()
            while (part := await self._in_time(form.next())) is not None:
                name = part.name if isinstance(part, BodyPartReader) else None
                if name is None or not isinstance(part, BodyPartReader):
                    raise _broken("each part must be a field with a name")
                if hdrs.CONTENT_ENCODING in part.headers or hdrs.CONTENT_TRANSFER_ENCODING in part.headers:
                    raise _broken("a part must not have an encoding")
                if name == "file" and not has_file:
                    has_file = True
                    upload.filename = _filename(part.filename)
                    upload.size = await self._content(part, writer)
                elif name in FIELDS and name not in self._fields:
                    self._fields[name] = await self._value(name, part)
                else:
                    known = ", ".join(("file", *FIELDS))
                    raise refused(name[:80], f"{shown(name)} is no field of an upload, or is given twice: {known}.")
        except (ValueError, RuntimeError, AssertionError, HttpProcessingError, web.RequestPayloadError) as error:
            raise _broken(str(error)[:100] or "it ends too early") from error
        if not has_file:
            raise refused("file", "file is missing: send the content as a part with this name and a filename.")
        upload.purpose = _purpose(self._fields.get("purpose"))
        upload.expires_s = _expiry(self._fields)
        return upload

    async def _content(self, part: BodyPartReader, writer: ObjectWriter) -> int:
        size = 0
        while data := await self._in_time(part.read_chunk(CHUNK)):
            size += len(data)
            if size > self._max_bytes:
                raise too_large(self._max_bytes)
            await writer.write(data)
        if not size:
            raise refused("file", "file is empty.")
        return size

    async def _value(self, name: str, part: BodyPartReader) -> str:
        data = b""
        while piece := await self._in_time(part.read_chunk(MAX_FIELD_BYTES)):
            data += piece
            if len(data) > MAX_FIELD_BYTES:
                raise refused(name, f"{name} must have at most {MAX_FIELD_BYTES} bytes.")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise refused(name, f"{name} must be UTF-8.") from None

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            raise BodyTimeout(f"No part of the body arrived for {self._timeout_s:g} seconds.") from None


def too_large(most: int) -> FileTooLarge:
    return FileTooLarge(f"The file is over the limit of {most} bytes (this server's setting --max-file-bytes).")


def _broken(why: str) -> InvalidRequest:
    return InvalidRequest(f"The body is no valid form: {why}.", code="invalid_body")


def _filename(name: str | None) -> str:
    """Return the name of a file, which is shown and never used as a path. Raises InvalidRequest."""
    if not name or len(name) > MAX_FILENAME or _CONTROL.search(name):
        raise refused(
            "file", f"file must have a filename of 1 to {MAX_FILENAME} characters without control characters."
        )
    return name


def _purpose(value: str | None) -> str:
    if value is None or value not in UPLOADED:
        given = "is missing" if value is None else f"is {shown(value)}"
        raise refused("purpose", f"purpose {given}; this server keeps files for {', '.join(UPLOADED)}.")
    return value


def _expiry(fields: dict[str, str]) -> int:
    """Return the seconds of `expires_after`; 0 without it. Raises InvalidRequest."""
    anchor, seconds = fields.get(ANCHOR), fields.get(SECONDS)
    if anchor is None and seconds is None:
        return 0
    if anchor != "created_at":
        raise refused(ANCHOR, f"{ANCHOR} must be created_at.")
    if seconds is None or not re.fullmatch(r"[0-9]{1,9}", seconds, re.ASCII):
        raise refused(SECONDS, f"{SECONDS} must be an integer from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}.")
    try:
        return expiry_s(SECONDS, int(seconds))
    except InvalidValue as error:
        raise of_check(error) from None
