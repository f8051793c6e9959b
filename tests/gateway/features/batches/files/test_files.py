"""Files: their routes, their records and their deletion."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from quire.gateway.features.batches.batch_service import BATCHES
from quire.gateway.features.batches.files.file_service import IN_USE_S, storage_of, sweep
from quire.gateway.features.batches.files.file_store import (
    FileStore,
    StorageBounds,
    StorageFull,
    StoredFile,
    UploadLost,
    new_file_id,
)
from quire.gateway.features.batches.files.folder_storage import FolderStorage
from quire.gateway.features.batches.files.s3_storage import S3Storage
from quire.gateway.features.batches.files.storage import CHUNK, StorageError
from quire.gateway.settings import GatewaySettings
from quire.shared.process.errors import StartError
from quire.shared.protocol.keys import BATCHES_TAG
from quire.shared.redis.clients import command_client
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient
from tests.support.gateway.running import RunningGateway
from tests.support.gateway.storage_contract import names, put

# --- /v1/files: lists, downloads and deletions; and a storage that fails ----------------------------------------------


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"))


@pytest.fixture
def client(gateway: RunningGateway) -> BatchClient:
    return BatchClient(gateway)


def storage_of_gateway(gateway: RunningGateway) -> Any:
    return gateway.app[BATCHES]._files.store.storage


async def test_files_are_listed_in_pages(client: BatchClient) -> None:
    ids = [(await client.upload(b"x", f"{number}.jsonl"))["id"] for number in range(5)]
    everything = await client.json("GET", "/v1/files")
    assert [one["id"] for one in everything["data"]] == ids[::-1]
    assert everything["has_more"] is False
    page = await client.json("GET", f"/v1/files?order=asc&limit=2&after={ids[0]}&purpose=batch")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids[1:3], True)
    assert (page["first_id"], page["last_id"]) == (ids[1], ids[2])
    assert (await client.json("GET", "/v1/files?purpose=batch_output"))["data"] == []


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "order=up", "purpose=x", "after=x", "more=1"])
async def test_a_wrong_query_is_named(client: BatchClient, query: str) -> None:
    status, data = await client.call("GET", f"/v1/files?{query}")
    assert (status, json.loads(data)["error"]["param"]) == (400, query.split("=")[0])


async def test_the_content_is_what_was_uploaded(gateway: RunningGateway, client: BatchClient) -> None:
    content = bytes(range(256)) * (3 * CHUNK // 256) + b"end"
    file = await client.upload(content, "b\u00f6se \U0001f40d.jsonl")
    status, data = await client.call("GET", f"/v1/files/{file['id']}/content")
    assert (status, data) == (200, content)
    assert (await client.json("GET", f"/v1/files/{file['id']}")) == file
    assert file["filename"] == "b\u00f6se \U0001f40d.jsonl"
    assert (await client.json("DELETE", f"/v1/files/{file['id']}")) == {
        "id": file["id"],
        "object": "file",
        "deleted": True,
    }
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content"):
        assert (await client.call("GET", path))[0] == 404
    assert (await client.call("DELETE", f"/v1/files/{file['id']}"))[0] == 404


async def test_a_name_is_never_a_path(gateway: RunningGateway, client: BatchClient, tmp_path: Path) -> None:
    name = "../../evil\\..\\x"
    file = await client.upload(b"x", name)
    assert file["filename"] == name
    assert not (tmp_path / "evil").exists()
    assert len((await client.json("GET", "/v1/files"))["data"]) == 1


async def test_the_openai_sdk(gateway: RunningGateway) -> None:
    async with gateway.openai() as sdk:
        file = await sdk.files.create(
            file=("a.jsonl", b"one\ntwo\n"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (await sdk.files.retrieve(file.id)).filename == "a.jsonl"
        assert [one.id async for one in sdk.files.list()] == [file.id]
        assert (await sdk.files.content(file.id)).text == "one\ntwo\n"
        assert (await sdk.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            await sdk.files.retrieve(file.id)


async def test_a_storage_that_fails_is_an_error_of_its_own(
    gateway: RunningGateway, client: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await client.upload(b"x")

    @asynccontextmanager
    async def failing(*_: Any) -> AsyncIterator[Any]:
        raise StorageError("no disk")
        yield

    async def broken(*_: Any) -> AsyncIterator[bytes]:
        raise StorageError("no disk")
        yield b""

    monkeypatch.setattr(storage_of_gateway(gateway), "writing", failing)
    monkeypatch.setattr(storage_of_gateway(gateway), "read", broken)
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x", filename="x")
    for method, path, options in (
        ("POST", "/v1/files", {"data": form}),
        ("GET", f"/v1/files/{file['id']}/content", {}),
    ):
        status, data = await client.call(method, path, **options)
        assert (status, json.loads(data)["error"]["code"]) == (503, "storage_unavailable")
        assert "no disk" not in data.decode()


async def test_a_storage_that_fails_in_the_middle_breaks_the_download_off(
    gateway: RunningGateway, client: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await client.upload(b"x" * 1000)

    async def half(*_: Any) -> AsyncIterator[bytes]:
        yield b"x" * 500
        raise StorageError("no disk")

    monkeypatch.setattr(storage_of_gateway(gateway), "read", half)
    with pytest.raises(aiohttp.ClientError):
        await client.call("GET", f"/v1/files/{file['id']}/content")


# --- Which storage the settings name, and the deletion of what has expired --------------------------------------------


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


# --- The records of files: bounds, owners, pages and deletions --------------------------------------------------------


@pytest.fixture
async def records(redis_url: str, tmp_path: Path) -> AsyncIterator[FileStore]:
    client = command_client(redis_url, BATCHES_TAG, connections=2)
    yield FileStore(client, FolderStorage(tmp_path), StorageBounds(file=100, owner=150, all=250))
    await client.aclose()


async def add_record(records: FileStore, size: int = 10, owner: str = "o", file_id: str = "") -> StoredFile:
    file_id = file_id or new_file_id()
    await records.reserve(file_id, owner, size)
    await put(records.storage, "0", b"x" * size, file_id=file_id)
    return await records.complete(file_id, owner, size, 0, filename="a.jsonl", purpose="batch")


async def used(records: FileStore) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = await records.client.hgetall(records.keys.used)
    return found


async def test_uploads_reserve_what_they_may_take(records: FileStore) -> None:
    first, second = new_file_id(), new_file_id()
    await records.reserve(first, "o", 100)
    with pytest.raises(StorageFull) as caught:
        await records.reserve(second, "o", 100)
    assert (caught.value.whose, caught.value.taken) == ("owner", 100)
    assert await records.get(first, "o") is None  # it is not complete
    await add_record(records, 30, file_id=first)
    await records.reserve(second, "o", 100)  # the first one was smaller than it might have been
    assert await used(records) == {b"all": b"130", b"owner:o": b"130"}
    await records.reserve(new_file_id(), "p", 100)
    with pytest.raises(StorageFull) as caught:
        await records.reserve(new_file_id(), "p", 50)
    assert caught.value.whose == "all"
    assert await records.delete(second, "o") == "deleted"
    assert await used(records) == {b"all": b"130", b"owner:o": b"30", b"owner:p": b"100"}


async def test_an_upload_grows_to_the_bound_and_no_further(records: FileStore) -> None:
    """What it has reserved already does not count against it."""
    file_id = new_file_id()
    for size in (100, 149, 150):
        await records.reserve(file_id, "o", size)
    with pytest.raises(StorageFull) as caught:
        await records.reserve(file_id, "o", 151)
    assert (caught.value.whose, caught.value.taken) == ("owner", 150)
    assert await used(records) == {b"all": b"150", b"owner:o": b"150"}


async def test_a_repeated_command_counts_once(records: FileStore) -> None:
    file_id = new_file_id()
    for _ in range(2):
        await records.reserve(file_id, "o", 100)
    for _ in range(2):
        await add_record(records, 40, file_id=file_id)
    assert await used(records) == {b"all": b"40", b"owner:o": b"40"}


@pytest.mark.parametrize("life_s", [0, 5000])
async def test_a_renewal_that_comes_after_the_end_of_an_upload_changes_nothing(store: FileStore, life_s: int) -> None:
    file_id = new_file_id()
    await store.reserve(file_id, "o", 10)
    file = await store.complete(file_id, "o", 10, life_s, filename="a", purpose="batch")
    expires = await store.client.zscore(store.keys.expiring, file_id)
    for size in (10, 1000):  # the second is over all bounds
        await store.reserve(file_id, "o", size, has_begun=True)
    assert await store.get(file_id, "o") == file
    assert await store.client.zscore(store.keys.expiring, file_id) == expires == (file.expires or None)
    assert await used(store) == {b"all": b"10", b"owner:o": b"10"}


async def test_an_upload_that_was_given_up_does_not_come_back(store: FileStore) -> None:
    file_id = new_file_id()
    await store.reserve(file_id, "o", 10)
    await store.client.hset(store.keys.file(file_id), "expires", 1)  # the lease has ended
    assert await store.delete(file_id, "o", only_expired=True) == "deleted"
    with pytest.raises(UploadLost):
        await store.reserve(file_id, "o", 10, has_begun=True)
    with pytest.raises(UploadLost):
        await store.complete(file_id, "o", 10, 0, filename="a", purpose="batch")
    assert await used(store) == {b"all": b"0"}
    assert not await store.client.exists(store.keys.file(file_id), store.keys.expiring, store.keys.files("o"))
