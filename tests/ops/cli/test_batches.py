"""The command `quire batch`, and its client, at a gateway of this process."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.ops.cli.batch_client import PIECE, BatchClient
from quire.ops.cli.batches import ProgressLine, batch, first_url
from quire.ops.cli.settings import BatchCommandSettings
from quire.shared.config.command_line import CommandError
from tests.gateway.conftest import Start, model_folder, redis_server, redis_url
from tests.support.gateway.batch_calls import chat_line, jsonl
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway
from tests.support.gateway.storage_contract import names

__all__ = ["model_folder", "redis_server", "redis_url"]

# --- batch client -----------------------------------------------------------------------------------------------------
# The client of `quire batch`: uploads from a file, downloads to a file, and errors that name the remedy.


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


# --- batches ----------------------------------------------------------------------------------------------------------
# `quire batch` from the submission to the files with the answers.


async def quire_batch(gateway: RunningGateway, action: str, **options: Any) -> int:
    settings = BatchCommandSettings(action=action, url=gateway.url, **options)
    return await asyncio.to_thread(batch, settings, {})


@pytest.fixture(autouse=True)
def _no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal handlers can be set in the main thread only."""
    monkeypatch.setattr("quire.ops.cli.batches.raise_at_ctrl_c", lambda: None)


async def test_a_batch_from_the_submission_to_its_files(
    gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [chat_line(number, **({"max_tokens": 100_000} if number == 3 else {})) for number in range(5)]
    path = tmp_path / "calls.jsonl"
    path.write_bytes(jsonl(lines))
    async with gateway.worker(emit([ord("a")])):
        assert await quire_batch(gateway, "submit", file=str(path), wait=True, metadata="a=b,c=d") == 0
    printed = capsys.readouterr()
    batch_id = printed.out.strip()
    assert batch_id.startswith("batch_")
    assert "100% 5/5, 1 failed" in printed.err
    assert await quire_batch(gateway, "status", id=batch_id, json=True) == 0
    assert json.loads(capsys.readouterr().out)["metadata"] == {"a": "b", "c": "d"}
    assert await quire_batch(gateway, "list") == 0
    assert capsys.readouterr().out.startswith(f"{batch_id}  completed  /v1/chat/completions  4 of 5 lines completed, 1")
    output, errors = tmp_path / "answers.jsonl", tmp_path / "failed.jsonl"
    assert await quire_batch(gateway, "fetch", id=batch_id, output=str(output), errors=str(errors)) == 0
    found = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert found == [f"line-{number}" for number in (0, 1, 2, 4)]
    assert json.loads(errors.read_text())["custom_id"] == "line-3"
    assert names(tmp_path) == {"calls.jsonl", "files", "answers.jsonl", "failed.jsonl"}


async def test_a_batch_that_is_wrong_prints_its_errors(
    gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_bytes(jsonl([chat_line(1), chat_line(1)]))
    assert await quire_batch(gateway, "submit", file=str(path), wait=True) == 1
    assert "line 2: An earlier line has the same custom_id." in capsys.readouterr().err


async def test_a_cancelled_batch(gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_bytes(jsonl([chat_line(1)]))
    assert await quire_batch(gateway, "submit", file=str(path)) == 0
    batch_id = capsys.readouterr().out.strip()
    with pytest.raises(CommandError, match=r"has not ended .*--wait"):
        await quire_batch(gateway, "fetch", id=batch_id)
    assert await quire_batch(gateway, "cancel", id=batch_id) == 0
    assert await quire_batch(gateway, "status", id=batch_id, wait=True) == 0
    assert "cancelled" in capsys.readouterr().out


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for action, name in (("submit", "--file"), ("status", "--id"), ("cancel", "--id"), ("fetch", "--id")):
        with pytest.raises(CommandError, match=f"{name} is missing"):
            batch(BatchCommandSettings(action=action), {})
    with pytest.raises(CommandError, match=r"--file .* cannot be read"):
        first_url(tmp_path / "none")
    for content in (b"", b"{}\n", b"[]\n", b"x"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(CommandError, match="--endpoint"):
            first_url(tmp_path / "x")


async def test_metadata_is_key_and_value(gateway: RunningGateway, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(jsonl([chat_line(1)]))
    with pytest.raises(CommandError, match="--metadata: 'a' is not KEY=VALUE"):
        await quire_batch(gateway, "submit", file=str(path), metadata="a")


def test_a_terminal_shows_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    to = Terminal()
    line = ProgressLine(to)
    line.show("a longer text")
    line.show("short")
    line.end()
    assert to.getvalue() == "\ra longer text\rshort        \n"
    monkeypatch.setenv("COLUMNS", "8")
    line.show("wider than that")
    assert to.getvalue().endswith("\rwider t"), "a wrapped line could not be drawn over"
    plain = io.StringIO()
    line = ProgressLine(plain)
    for number in range(3):
        line.show(str(number))
    line.show("last", is_last=True)
    line.end()
    assert plain.getvalue() == "0\nlast\n"
