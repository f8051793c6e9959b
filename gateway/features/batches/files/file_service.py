"""The files of a gateway process: the store, or none, and the task that deletes what has expired."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisError

from quire.gateway.admission.retry import AccountRetry
from quire.gateway.errors.api_errors import FilesAreOff, NotFound, StorageDown
from quire.gateway.features.batches.files.file_store import (
    OF_IMAGES,
    PREFIX,
    VISION,
    FileStore,
    StorageBounds,
    StoredFile,
    read_id,
)
from quire.gateway.features.batches.files.folder_storage import FolderStorage
from quire.gateway.features.batches.files.s3_storage import S3Storage
from quire.gateway.features.batches.files.storage import WHOLE, ObjectWriter, Storage, StorageError
from quire.gateway.settings import FileSettings
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.keys import BATCHES_TAG
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.clients import command_client
from quire.shared.redis.clock import unix_time

T = TypeVar("T")

log = logging.getLogger("gateway")

# Seconds between two looks for expired files, and files that are deleted at one look.
SWEEP_S = 60.0
SWEEP_COUNT = 100
# Seconds after which an expired file that a batch still reads is looked at again.
IN_USE_S = 3600


def storage_of(settings: FileSettings) -> Storage | None:
    """Return the storage that the settings name; None without one. Raises StartError."""
    if not settings.has_files:
        return None
    if settings.files_bucket:
        return S3Storage(settings.files_bucket, settings.files_bucket_endpoint)
    return FolderStorage(settings.files_dir)


class FileService:
    """The files of a process, between `start` and `close`."""

    # Repeats commands while Redis is away.
    retry: AccountRetry

    def __init__(self, settings: FileSettings, redis_url: str) -> None:
        """Raise StartError for settings that contradict."""
        self._settings = settings
        self._redis_url = redis_url
        self._storage = storage_of(settings)
        self._store: FileStore | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """True if the process has a storage."""
        return self._storage is not None

    @property
    def store(self) -> FileStore:
        """The store. Raises FilesAreOff without one."""
        self.check_on()
        assert self._store is not None, "the process has started"
        return self._store

    def check_on(self) -> None:
        """Raise FilesAreOff without a storage."""
        if self._storage is None:
            raise FilesAreOff(
                "This server stores no files, so it has no batches: its setting --files-dir (QUIRE_FILES_DIR) or "
                "--files-bucket (QUIRE_FILES_BUCKET) turns them on."
            )

    async def open(self) -> None:
        """Open the storage, before anything else of the process. Raises StartError if it cannot be used."""
        if self._storage is not None:
            await self._storage.start()

    async def start(self, retry: AccountRetry) -> None:
        """Connect to Redis."""
        self.retry = retry
        if self._storage is None:
            return
        settings = self._settings
        self._client = command_client(self._redis_url, BATCHES_TAG, connections=4)
        bounds = StorageBounds(settings.max_file_bytes, settings.key_file_bytes, settings.max_stored_file_bytes)
        self._store = FileStore(self._client, self._storage, bounds)
        self._sweeper = asyncio.create_task(self._sweep_all())

    async def close(self) -> None:
        if self._storage is None or self._sweeper is None:
            return
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._client.aclose()
        await self._storage.close()

    async def find(self, public_id: str, owner: str) -> StoredFile:
        """Return a file of an owner. Raises NotFound, FilesAreOff and BrokerDown."""
        store, file_id = self.store, read_id(public_id, PREFIX)
        file = await self.retry(partial(store.get, file_id, owner)) if file_id else None
        if file is None:
            raise not_found(public_id)
        return file

    async def write(self, file_id: str, read: Callable[[ObjectWriter], Awaitable[T]]) -> T:
        """Write the only object of an upload with what `read` passes on, and return its result. Raises StorageDown."""
        try:
            async with self.store.storage.writing(file_id, WHOLE) as writer:
                return await read(writer)
        except StorageError as error:
            raise storage_down(error) from error

    async def content(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield the content of a file. Raises StorageDown and BrokerDown."""
        try:
            for name, size in await self.retry(partial(self.store.parts, file.id)):
                async for data in self.store.storage.read(file.id, name, 0, size):
                    yield data
        except StorageError as error:
            raise storage_down(error) from error

    async def image(self, public_id: str, owner: str) -> tuple[int, Callable[[], Awaitable[bytes]]]:
        """Return the size of a file that a call names as its image, and what reads it.

        Both raise NotFound, StorageDown and BrokerDown.
        """
        file = await self.find(public_id, owner)
        if file.purpose not in OF_IMAGES:
            raise NotFound(f"the purpose of the file is {file.purpose}; upload it with the purpose {VISION}")

        async def read() -> bytes:
            content = b"".join([piece async for piece in self.content(file)])
            if len(content) != file.bytes:  # deleted meanwhile
                raise not_found(public_id)
            return content

        return file.bytes, read

    async def delete(self, file_id: str, owner: str) -> str:
        """Delete a file. Returns `deleted`, `used` or `unknown`. Raises BrokerDown."""
        try:
            return await self.retry(partial(self.store.delete, file_id, owner))
        except StorageError as error:
            log.warning("the content of file %s is deleted later: %s", file_id, error)
            return "deleted"  # the record is gone

    async def _sweep_all(self) -> None:
        while True:
            try:
                await sweep(self.store)
            except (RedisError, OSError, StorageError) as error:
                log.warning("expired files cannot be deleted now: %s", error)
            check_cancelled()
            await asyncio.sleep(SWEEP_S)


async def sweep(store: FileStore) -> None:
    """Delete expired files, and the content of files whose deletion a gateway has not finished."""
    client, keys = store.client, store.keys
    now = int(await unix_time(client))
    for member in await client.zrangebyscore(keys.expiring, "-inf", now, start=0, num=SWEEP_COUNT):
        file_id = text(member)
        owner = await client.hget(keys.file(file_id), "owner")
        reply = await store.delete(file_id, text(owner or b""), only_expired=True)
        if reply == "used":
            await client.zadd(keys.expiring, {file_id: now + IN_USE_S})
        elif reply == "unknown":  # the record was lost with data of Redis
            await client.sadd(keys.doomed, file_id)
            await client.zrem(keys.expiring, file_id)
    doomed: Any = await client.srandmember(keys.doomed, SWEEP_COUNT)
    for file_id in doomed:
        await store.remove_content(text(file_id))


def not_found(public_id: str) -> NotFound:
    """Return the error for a file that the caller does not have. It hides whether others have it."""
    return NotFound(f"No such File object: {public_id[:80]}.", param="id")


def storage_down(error: StorageError) -> StorageDown:
    """Return the error for a storage that cannot be reached; the log has the reason."""
    log.warning("a call is refused, the storage of files fails: %s", error)
    return StorageDown("The storage of files cannot be used now. Try again later.", headers={"Retry-After": "5"})
