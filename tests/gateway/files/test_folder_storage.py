"""Files in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.gateway.files import folder_storage
from quire.gateway.files.folder_storage import FolderStorage
from quire.gateway.files.storage import Storage, StorageError
from quire.shared.errors import StartError
from tests.gateway.files.storage_contract import FILE, StorageContract, get, put, put_and_fail


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
