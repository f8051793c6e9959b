"""The reservation of an upload grows with its content, and its lease is renewed while the upload runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from quire.gateway.files import reservation
from quire.gateway.files.file_store import FileStore, StorageBounds, StorageFull, new_file_id
from quire.gateway.files.folder_storage import FolderStorage
from quire.gateway.files.reservation import STEP, Reservation, ReservedWriter
from quire.shared.keys import BATCHES_TAG
from quire.shared.redis.clients import command_client
from tests.support.gateway.running import until

MOST = 10 * STEP


class Content:
    """Counts the bytes that were written."""

    size = 0

    async def write(self, data: bytes) -> None:
        self.size += len(data)


@pytest.fixture
async def store(redis_url: str, tmp_path: Path) -> AsyncIterator[FileStore]:
    client = command_client(redis_url, BATCHES_TAG, connections=2)
    yield FileStore(client, FolderStorage(tmp_path), StorageBounds(file=MOST, owner=0, all=MOST))
    await client.aclose()


async def command(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def reserved(store: FileStore) -> int:
    return int(await store.client.hget(store.keys.used, "all") or 0)


async def test_bytes_are_reserved_before_they_are_written(store: FileStore) -> None:
    one = Reservation(store, command, new_file_id(), "o", MOST)
    await one.begin()
    assert await reserved(store) == STEP
    content = Content()
    writer = ReservedWriter(content, one)
    await writer.write(b"x" * STEP)
    assert await reserved(store) == STEP
    await writer.write(b"x")
    assert await reserved(store) == 2 * STEP + 1
    # Another upload has taken the rest meanwhile.
    await store.reserve(new_file_id(), "p", MOST - 3 * STEP)
    with pytest.raises(StorageFull):
        await writer.write(b"x" * 2 * STEP)
    assert content.size == STEP + 1


async def test_the_lease_is_renewed(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "RENEW_S", 0.01)
    file_id = new_file_id()
    one = Reservation(store, command, file_id, "o", MOST)
    await one.begin()
    await store.client.zadd(store.keys.expiring, {file_id: 1})
    async with one.renewing():

        async def is_renewed() -> bool:
            return bool(await store.client.zscore(store.keys.expiring, file_id) > 1)

        await until(is_renewed)
    assert await reserved(store) == STEP
