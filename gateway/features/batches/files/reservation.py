"""The bytes that an upload reserves while it runs.

They grow with the content, so a client that only announces an upload takes nothing from others. Their lease is renewed
while this gateway lives, so what a dead gateway has reserved is soon free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from redis.exceptions import RedisError

from quire.gateway.features.batches.files.file_store import FileStore, StorageFull, UploadLost
from quire.gateway.features.batches.files.storage import ObjectWriter
from quire.shared.protocol.keys import UPLOAD_LEASE_S

log = logging.getLogger("gateway")

# Bytes that are reserved ahead of the content.
STEP = 1024 * 1024
RENEW_S = UPLOAD_LEASE_S / 4


# Carries out a command of the store, and turns what it raises into an error of the API.
InBounds = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


class Reservation:
    """The reservation of one upload."""

    def __init__(self, store: FileStore, in_bounds: InBounds, file_id: str, owner: str, most: int) -> None:
        """most: bytes that the content may have."""
        self._store = store
        self._in_bounds = in_bounds
        self._place = (file_id, owner)
        self._most = most
        self._reserved = 0
        self._lock = asyncio.Lock()

    async def begin(self) -> None:
        """Reserve the first bytes, if all that the upload may have are free now. Raises ApiError."""
        self._reserved = min(STEP, self._most)
        await self._in_bounds(partial(self._store.reserve, *self._place, self._reserved, self._most))

    async def grow(self, size: int) -> None:
        """Have at least `size` bytes reserved. Raises ApiError."""
        if size > self._reserved:
            async with self._lock:
                more = max(size, min(self._most, size + STEP))
                await self._in_bounds(partial(self._store.reserve, *self._place, more, has_begun=True))
                self._reserved = more

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Renew the lease while the context lasts."""
        task = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                async with self._lock:
                    await self._store.reserve(*self._place, self._reserved, has_begun=True)
            except (RedisError, OSError) as error:
                log.warning("the lease of upload %s is not renewed now: %s", self._place[0], error)
            except (StorageFull, UploadLost):
                return  # the next step of the upload fails


class ReservedWriter:
    """Reserves bytes before it writes them."""

    def __init__(self, writer: ObjectWriter, reservation: Reservation) -> None:
        self._writer = writer
        self._reservation = reservation
        self._size = 0

    async def write(self, data: bytes) -> None:
        self._size += len(data)
        await self._reservation.grow(self._size)
        await self._writer.write(data)
