"""Where files are kept: a folder or a bucket."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import aiohttp
import pytest

from quire.gateway.features.batches.batch_store import LinePlace, Window
from quire.gateway.features.batches.files import folder_storage, reservation, s3_storage
from quire.gateway.features.batches.files.file_store import FileStore, StorageBounds, StorageFull, new_file_id
from quire.gateway.features.batches.files.folder_storage import FolderStorage
from quire.gateway.features.batches.files.reservation import STEP, Reservation, ReservedWriter
from quire.gateway.features.batches.files.s3_storage import PART_BYTES, S3Storage
from quire.gateway.features.batches.files.storage import WHOLE, Storage, StorageError, check_names
from quire.shared.process.errors import StartError
from quire.shared.protocol.broker import new_id
from quire.shared.protocol.keys import BATCHES_TAG
from quire.shared.redis.clients import command_client
from tests.gateway.conftest import Start
from tests.gateway.features.batches.files.test_files import storage_of_gateway
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import until
from tests.support.gateway.storage_contract import FILE, StorageContract, get, names, put, put_and_fail

# --- Names of objects can be part of a path ---------------------------------------------------------------------------


def test_names_that_gateways_make() -> None:
    check_names(new_file_id(), WHOLE)
    window = Window("b", 4_999_999, new_id(), LinePlace(0, 1), LinePlace(1, 2))
    check_names(f"{window.index}-{window.token}")


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "a\\b", "A", "a\n", "a\0", "é", "x" * 65, "~"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        check_names("a", name)


# --- Files in a folder ------------------------------------------------------------------------------------------------


@pytest.fixture
async def storage(tmp_path: Path) -> Storage:
    found = FolderStorage(tmp_path / "a" / "files")
    await found.start()
    return found


class TestFolderStorage(StorageContract):
    async def test_nothing_is_left_of_an_object_that_failed(self, storage: Storage, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError):
            await put_and_fail(storage, 1, RuntimeError())
        assert list((tmp_path / "a" / "files").rglob("*")) == []

    async def test_others_cannot_read_the_files(self, storage: Storage, tmp_path: Path) -> None:
        await put(storage, "0", b"x")
        assert (tmp_path / "a" / "files" / FILE).stat().st_mode & 0o077 == 0

    async def test_a_full_disk_is_an_error_of_the_storage(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folder_storage, "_create", lambda _: Path("/dev/full").open("wb"))  # noqa: SIM115
        with pytest.raises(StorageError, match="No space left"):
            await put(storage, "0", b"x" * 1_000_000)
        with pytest.raises(StorageError, match="No such file"):
            await get(storage, "0")


async def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="--files-dir"):
        await FolderStorage(tmp_path / "file" / "x").start()


async def test_a_cancelled_writer_closes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the file was being opened, in a thread that cannot be stopped."""
    storage, opened, create = FolderStorage(tmp_path), [], folder_storage._create
    opening, release = threading.Event(), threading.Event()

    def slow(path: Path) -> BinaryIO:
        opening.set()
        release.wait(60)
        opened.append(create(path))
        return opened[0]

    monkeypatch.setattr(folder_storage, "_create", slow)
    task = asyncio.create_task(put(storage, "0", b"x"))
    assert await asyncio.to_thread(opening.wait, 60)
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)  # the task learns of it
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [file.closed for file in opened] == [True]
    assert names(tmp_path) == set()


# --- Files in a bucket of a real S3 server on this machine ------------------------------------------------------------


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The endpoint of a moto server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
async def bucket(s3_url: str, credentials: None) -> str:
    """A new bucket."""
    name = f"quire-{secrets.token_hex(8)}"
    async with aiohttp.ClientSession() as session, session.put(f"{s3_url}/{name}") as made:
        assert made.status == 200
    return name


@pytest.fixture
async def bucket_storage(s3_url: str, bucket: str) -> AsyncIterator[S3Storage]:
    found = S3Storage(f"s3://{bucket}/some/prefix/", s3_url)
    await found.start()
    yield found
    await found.close()


async def keys_in(storage: S3Storage) -> list[str]:
    found = await storage._client.list_objects_v2(Bucket=storage._bucket)
    return [one["Key"] for one in found.get("Contents", ())]


class TestS3Storage(StorageContract):
    large = 2 * PART_BYTES + 17

    async def test_an_upload_that_failed_leaves_no_parts(self, bucket_storage: S3Storage) -> None:
        with pytest.raises(ZeroDivisionError):
            await self._fail(bucket_storage)
        found = await bucket_storage._client.list_multipart_uploads(Bucket=bucket_storage._bucket)
        assert not found.get("Uploads")

    async def _fail(self, bucket_storage: S3Storage) -> None:
        async with bucket_storage.writing(FILE, "0") as writer:
            await writer.write(b"x" * self.large)
            raise ZeroDivisionError

    async def test_keys_begin_with_the_prefix(self, bucket_storage: S3Storage) -> None:
        await put(bucket_storage, "0", b"x")
        assert await keys_in(bucket_storage) == [f"some/prefix/{FILE}/0"]

    async def test_more_objects_than_a_page_of_a_list_are_deleted(
        self, bucket_storage: S3Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_storage, "PAGE", 3)
        for number in range(10):
            await put(bucket_storage, str(number), b"x")
        await bucket_storage.delete(FILE)
        assert await keys_in(bucket_storage) == []


async def test_a_server_that_is_gone_is_an_error_of_the_storage(bucket_storage: S3Storage, credentials: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StartError, match="--files-bucket"):
        await S3Storage("s3://quire", url).start()
    await put(bucket_storage, "0", b"x")
    bucket_storage._bucket = "gone"
    with pytest.raises(StorageError, match="NoSuchBucket"):
        await get(bucket_storage, "0")


@pytest.mark.parametrize("url", ["bucket", "s3:", "s3://", "http://x/y", "s3://a?b", "s3://a#b"])
def test_a_wrong_url_names_the_setting(url: str) -> None:
    with pytest.raises(StartError, match=r"--files-bucket \(QUIRE_FILES_BUCKET\)"):
        S3Storage(url)


@pytest.mark.slow
async def test_a_batch_with_its_files_in_a_bucket(start_gateway: Start, s3_url: str, bucket: str) -> None:
    """Two gateways share a bucket, as they share a folder."""
    first, second = [
        await start_gateway(files_bucket=f"s3://{bucket}/q", files_bucket_endpoint=s3_url) for _ in range(2)
    ]
    client = BatchClient(second)
    lines = [chat_line(number, **({"max_tokens": 100_000} if number == 5 else {})) for number in range(100)]
    async with first.worker(emit([ord("a")])):
        batch = await client.ended((await BatchClient(first).create(jsonl(lines)))["id"])
    output, errors = await client.outputs(batch)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(100) if number != 5]
    assert [one["custom_id"] for one in errors] == ["line-5"]
    for file_id in (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]):
        assert (await client.json("DELETE", f"/v1/files/{file_id}"))["deleted"] is True
    assert await keys_in(storage_of_gateway(first)) == []


# --- The reservation of an upload grows with its content, and its lease is renewed while the upload runs --------------


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
