"""Files in a folder."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from quire.gateway.files import folder_storage
from quire.gateway.files.folder_storage import FolderStorage
from quire.gateway.files.storage import Storage, StorageError
from quire.shared.errors import StartError
from tests.support.gateway.storage_contract import FILE, StorageContract, get, put, put_and_fail


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


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="--files-dir"):
        await FolderStorage(tmp_path / "file" / "x").start()


async def test_a_cancelled_writer_closes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the file was being opened, in a thread that cannot be stopped."""
    storage, opened, release, create = FolderStorage(tmp_path), [], threading.Event(), folder_storage._create

    def slow(path: Path) -> BinaryIO:
        release.wait(10)
        opened.append(create(path))
        return opened[0]

    monkeypatch.setattr(folder_storage, "_create", slow)
    task = asyncio.create_task(put(storage, "0", b"x"))
    await asyncio.sleep(0.05)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, release.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [file.closed for file in opened] == [True]
    assert names(tmp_path) == set()
