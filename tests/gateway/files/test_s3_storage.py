"""Files in a bucket of a real S3 server on this machine."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from quire.gateway.files import s3_storage
from quire.gateway.files.s3_storage import PART_BYTES, S3Storage
from quire.gateway.files.storage import StorageError
from quire.shared.errors import StartError
from tests.gateway.conftest import Start
from tests.gateway.files.test_file_routes import storage_of
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.storage_contract import FILE, StorageContract, get, put


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
async def storage(s3_url: str, bucket: str) -> AsyncIterator[S3Storage]:
    found = S3Storage(f"s3://{bucket}/some/prefix/", s3_url)
    await found.start()
    yield found
    await found.close()


class TestS3Storage(StorageContract):
    large = 2 * PART_BYTES + 17

    async def test_an_upload_that_failed_leaves_no_parts(self, storage: S3Storage) -> None:
        with pytest.raises(ZeroDivisionError):
            await self._fail(storage)
        found = await storage._client.list_multipart_uploads(Bucket=storage._bucket)
        assert not found.get("Uploads")

    async def _fail(self, storage: S3Storage) -> None:
        async with storage.writing(FILE, "0") as writer:
            await writer.write(b"x" * self.large)
            raise ZeroDivisionError

    async def test_keys_begin_with_the_prefix(self, storage: S3Storage) -> None:
        await put(storage, "0", b"x")
        found = await storage._client.list_objects_v2(Bucket=storage._bucket)
        assert [one["Key"] for one in found["Contents"]] == [f"some/prefix/{FILE}/0"]

    async def test_more_objects_than_a_page_of_a_list_are_deleted(
        self, storage: S3Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_storage, "PAGE", 3)
        for number in range(10):
            await put(storage, str(number), b"x")
        await storage.delete(FILE)
        assert (await storage._client.list_objects_v2(Bucket=storage._bucket))["KeyCount"] == 0


async def test_a_server_that_is_gone_is_an_error_of_the_storage(storage: S3Storage, credentials: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StartError, match="--files-bucket"):
        await S3Storage("s3://quire", url).start()
    await put(storage, "0", b"x")
    storage._bucket = "gone"
    with pytest.raises(StorageError, match="NoSuchBucket"):
        await get(storage, "0")


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
    storage = storage_of(first)
    assert (await storage._client.list_objects_v2(Bucket=bucket))["KeyCount"] == 0
