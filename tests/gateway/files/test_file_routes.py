"""/v1/files: lists, downloads and deletions; and a storage that fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from quire.gateway.batches.batch_service import BATCHES
from quire.gateway.files.storage import CHUNK, StorageError
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient
from tests.support.gateway.running import RunningGateway


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"))


@pytest.fixture
def client(gateway: RunningGateway) -> BatchClient:
    return BatchClient(gateway)


def storage_of(gateway: RunningGateway) -> Any:
    assert gateway._runner is not None
    return gateway._runner.app[BATCHES]._files.store.storage


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

    monkeypatch.setattr(storage_of(gateway), "writing", failing)
    monkeypatch.setattr(storage_of(gateway), "read", broken)
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

    monkeypatch.setattr(storage_of(gateway), "read", half)
    with pytest.raises(aiohttp.ClientError):
        await client.call("GET", f"/v1/files/{file['id']}/content")
