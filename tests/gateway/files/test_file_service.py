"""Which storage the settings name, and the deletion of what has expired."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.gateway.files.file_service import IN_USE_S, storage_of, sweep
from quire.gateway.files.file_store import FileStore, StorageBounds, new_file_id
from quire.gateway.files.folder_storage import FolderStorage
from quire.gateway.files.s3_storage import S3Storage
from quire.gateway.settings import GatewaySettings
from quire.shared.errors import StartError
from quire.shared.keys import BATCHES_TAG
from quire.shared.redis.clients import command_client
from tests.gateway.conftest import Start
from tests.gateway.files.test_folder_storage import names
from tests.support.gateway.storage_contract import put


def test_the_settings_name_a_storage_or_none() -> None:
    assert storage_of(GatewaySettings()) is None
    assert isinstance(storage_of(GatewaySettings(files_dir="x")), FolderStorage)
    assert isinstance(storage_of(GatewaySettings(files_bucket="s3://a")), S3Storage)
    with pytest.raises(StartError, match="--files-dir and --files-bucket"):
        storage_of(GatewaySettings(files_dir="x", files_bucket="s3://a"))


async def test_a_folder_that_cannot_be_written_stops_the_start(start_gateway: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="--files-dir"):
        await start_gateway(files_dir=str(tmp_path / "file" / "x"))


@pytest.fixture
async def store(redis_url: str, tmp_path: Path) -> AsyncIterator[FileStore]:
    client = command_client(redis_url, BATCHES_TAG, connections=2)
    yield FileStore(client, FolderStorage(tmp_path), StorageBounds(1000, 0, 0))
    await client.aclose()


async def add(store: FileStore, life_s: int = 0) -> str:
    file_id = new_file_id()
    await store.reserve(file_id, "o", 1)
    await put(store.storage, "0", b"x", file_id=file_id)
    await store.complete(file_id, "o", 1, life_s, filename="x", purpose="batch")
    return file_id


async def expire(store: FileStore, file_id: str) -> str:
    """Make a file one that has expired."""
    past = int(time.time()) - 1
    await store.client.hset(store.keys.file(file_id), "expires", past)
    await store.client.zadd(store.keys.expiring, {file_id: past})
    return file_id


async def test_expired_files_and_uploads_that_never_ended_are_deleted(store: FileStore, tmp_path: Path) -> None:
    expired, kept, forever = await expire(store, await add(store)), await add(store, 100), await add(store)
    upload = new_file_id()
    await store.reserve(upload, "o", 100)
    await put(store.storage, "0", b"x", file_id=await expire(store, upload))
    await sweep(store)
    assert names(tmp_path) == {kept, forever}
    assert await store.get(expired, "o") is None
    assert await store.client.hget(store.keys.used, "all") == b"2"
    assert await store.client.smembers(store.keys.doomed) == set()


async def test_redis_decides_whether_a_file_has_expired(store: FileStore) -> None:
    file_id = await add(store, 100)
    assert await store.delete(file_id, "o", only_expired=True) == "kept"
    assert await store.delete(await add(store), "o", only_expired=True) == "kept"
    assert await store.get(file_id, "o") is not None
    assert await store.delete(await expire(store, file_id), "o", only_expired=True) == "deleted"


async def test_a_file_that_a_batch_reads_stays(store: FileStore) -> None:
    now = int(time.time())
    file_id = await expire(store, await add(store))
    await store.client.hincrby(store.keys.file(file_id), "uses", 1)
    await sweep(store)
    assert await store.get(file_id, "o") is not None
    assert await store.client.zscore(store.keys.expiring, file_id) == pytest.approx(now + IN_USE_S, abs=2)


async def test_a_deletion_that_was_not_finished_is_finished(store: FileStore, tmp_path: Path) -> None:
    file_id = await add(store)
    await store._delete_file(keys=[store.keys.file(file_id)], args=[store.keys.prefix, file_id, "o", ""])
    assert (tmp_path / file_id).exists()
    await sweep(store)
    assert not (tmp_path / file_id).exists()


async def test_a_file_whose_record_was_lost_is_deleted(store: FileStore, tmp_path: Path) -> None:
    file_id = await expire(store, await add(store))
    await store.client.delete(store.keys.file(file_id))
    await sweep(store)
    assert not (tmp_path / file_id).exists()
    assert await store.client.zcard(store.keys.expiring) == 0
