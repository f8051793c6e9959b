"""The client of `quire batch`: uploads from a file, downloads to a file, and errors that name the remedy."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from quire.ops.cli.batch_client import PIECE, BatchClient
from quire.shared.command_line import CommandError
from tests.gateway.conftest import Start, model_folder, redis_server, redis_url
from tests.support.gateway.running import RunningGateway

__all__ = ["model_folder", "redis_server", "redis_url"]


@pytest.fixture
async def gateway(redis_url: str, model_folder: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with AsyncExitStack() as stack:
        start = Start(stack, model=str(model_folder), redis_url=redis_url)
        yield await start(files_dir=str(tmp_path / "files"), max_file_bytes=3 * PIECE)


async def test_a_file_goes_there_and_back(gateway: RunningGateway, tmp_path: Path) -> None:
    client, path = BatchClient(gateway.url), tmp_path / 'na"me.jsonl'
    content = b"x" * (2 * PIECE) + b"end"
    path.write_bytes(content)
    seen: list[tuple[int, int]] = []
    file_id = await asyncio.to_thread(client.upload, path, lambda sent, size: seen.append((sent, size)))
    assert seen[-1] == (len(content), len(content))
    assert len(seen) == 3
    to = io.BytesIO()
    assert await asyncio.to_thread(client.download, file_id, to) == len(content)
    assert to.getvalue() == content
    assert (await gateway.get(f"/v1/files/{file_id}")).json["filename"] == "na_me.jsonl"


async def test_a_file_that_is_too_large_is_refused(gateway: RunningGateway, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (40 * PIECE))
    with pytest.raises(CommandError, match=r"413.*--max-file-bytes"):
        await asyncio.to_thread(BatchClient(gateway.url).upload, path, lambda *_: None)


async def test_an_unknown_batch(gateway: RunningGateway) -> None:
    client = BatchClient(gateway.url)
    for call in (client.show, client.cancel):
        with pytest.raises(CommandError, match=r"refused with 404: No such Batch object: x/\.\./y"):
            await asyncio.to_thread(call, "x/../y")
    with pytest.raises(CommandError, match="refused with 404: No such File object"):
        await asyncio.to_thread(client.download, "file-1", io.BytesIO())


def test_without_a_server_or_a_file(tmp_path: Path) -> None:
    client = BatchClient("http://127.0.0.1:1")
    with pytest.raises(CommandError, match=r"no server at http://127\.0\.0\.1:1 .*--url"):
        client.all(5)
    for path, what in ((tmp_path / "none", "does not exist"), (tmp_path, "cannot be read")):
        with pytest.raises(CommandError, match=what):
            client.upload(path, lambda *_: None)
