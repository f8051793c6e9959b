"""Stores files in a bucket of any S3 endpoint. Credentials come from where AWS' own programs look for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from quire.gateway.features.batches.files.storage import CHUNK, ObjectWriter, StorageError, check_names
from quire.shared.process.errors import StartError
from quire.shared.process.version import install_command

# Bytes of a part of an upload: S3 refuses smaller parts, except for the last one. 10,000 parts are an object of 80 GB.
PART_BYTES = 8 * 1024 * 1024
# Objects that one call lists and deletes.
PAGE = 1000
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 30.0
ATTEMPTS = 3


class S3Storage:
    """The objects of a file have the keys `<prefix>/<file id>/<name>`."""

    def __init__(self, url: str, endpoint: str = "") -> None:
        """url: `s3://BUCKET/PREFIX`. endpoint: by default that of AWS. Raises StartError for a wrong URL."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise StartError(f"--files-bucket (QUIRE_FILES_BUCKET): {url!r} is not s3://BUCKET or s3://BUCKET/PREFIX")
        self._bucket = parts.netloc
        # Without a prefix, the keys begin with the ids.
        self._prefix = f"{parts.path.strip('/')}/".removeprefix("/")
        self._endpoint = endpoint or None
        self._client: Any = None

    async def start(self) -> None:
        """Connect, and look at the bucket. Raises StartError if it cannot be reached."""
        try:
            from aiobotocore.config import AioConfig
            from aiobotocore.session import get_session
        except ModuleNotFoundError as error:
            raise StartError(
                "--files-bucket (QUIRE_FILES_BUCKET) needs the Python package aiobotocore: "
                f"`{install_command('s3')}` installs it"
            ) from error
        config = AioConfig(
            connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S, retries={"total_max_attempts": ATTEMPTS}
        )
        self._stack = AsyncExitStack()
        try:
            client = get_session().create_client("s3", endpoint_url=self._endpoint, config=config)
            self._client = await self._stack.enter_async_context(client)
            await self._client.head_bucket(Bucket=self._bucket)
        except Exception as error:
            await self._stack.aclose()
            raise StartError(
                f"--files-bucket (QUIRE_FILES_BUCKET): the bucket {self._bucket} cannot be used: {error}; check its "
                "name, --files-bucket-endpoint (QUIRE_FILES_BUCKET_ENDPOINT), and the credentials and region in the "
                "environment"
            ) from error

    async def close(self) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def writing(self, file_id: str, name: str) -> AsyncIterator[ObjectWriter]:
        """Write an object: a small one with one call, a larger one in parts. S3 shows it when it is complete."""
        check_names(file_id, name)
        writer = _S3Writer(self._client, {"Bucket": self._bucket, "Key": self._key(file_id, name)})
        try:
            yield writer
            await writer.finish()
        except BaseException:
            await asyncio.shield(writer.abort())
            raise

    async def read(self, file_id: str, name: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        check_names(file_id, name)
        if end is not None and start >= end:
            return
        whole = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        with _errors():
            reply = await self._client.get_object(Bucket=self._bucket, Key=self._key(file_id, name), **whole)
            async with reply["Body"] as body:
                while data := await body.read(CHUNK):
                    yield data

    async def delete(self, file_id: str) -> None:
        check_names(file_id)
        with _errors():
            pages = self._client.get_paginator("list_objects_v2")
            where = {"Bucket": self._bucket, "Prefix": self._key(file_id, "")}
            async for page in pages.paginate(**where, PaginationConfig={"PageSize": PAGE}):
                if objects := [{"Key": item["Key"]} for item in page.get("Contents", ())]:
                    reply = await self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects})
                    if errors := reply.get("Errors"):
                        raise StorageError(f"{len(errors)} objects cannot be deleted: {errors[0].get('Code')}")

    def _key(self, file_id: str, name: str) -> str:
        return f"{self._prefix}{file_id}/{name}"


class _S3Writer:
    """Collects PART_BYTES of an object at a time."""

    def __init__(self, client: Any, place: dict[str, str]) -> None:
        self._client = client
        self._place = place
        self._waiting = bytearray()
        self._upload = ""
        self._parts: list[dict[str, Any]] = []

    async def write(self, data: bytes) -> None:
        self._waiting += data
        while len(self._waiting) >= PART_BYTES:
            await self._send(bytes(self._waiting[:PART_BYTES]))
            del self._waiting[:PART_BYTES]

    async def finish(self) -> None:
        """Send the rest, and make the object visible."""
        with _errors():
            if not self._upload:
                await self._client.put_object(Body=bytes(self._waiting), **self._place)
                return
        if self._waiting:
            await self._send(bytes(self._waiting))
        with _errors():
            await self._client.complete_multipart_upload(
                UploadId=self._upload, MultipartUpload={"Parts": self._parts}, **self._place
            )

    async def abort(self) -> None:
        """Drop the parts that were sent. A lifecycle rule of the bucket drops those of a gateway that died."""
        if self._upload:
            with suppress(Exception):
                await self._client.abort_multipart_upload(UploadId=self._upload, **self._place)

    async def _send(self, data: bytes) -> None:
        with _errors():
            if not self._upload:
                self._upload = (await self._client.create_multipart_upload(**self._place))["UploadId"]
            number = len(self._parts) + 1
            sent = await self._client.upload_part(PartNumber=number, UploadId=self._upload, Body=data, **self._place)
            self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})


@contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of the endpoint and of the connection to it into StorageError."""
    from aiohttp import ClientError as HttpError
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (OSError, HttpError, BotoCoreError, ClientError) as error:
        raise StorageError(str(error)) from error
