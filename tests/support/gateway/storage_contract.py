"""The behaviour of every storage; the tests of each storage run all of these."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.features.batches.files.storage import CHUNK, Storage, StorageError

FILE = "0" * 32


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def put(storage: Storage, name: str, *pieces: bytes, file_id: str = FILE) -> None:
    async with storage.writing(file_id, name) as writer:
        for piece in pieces:
            await writer.write(piece)


async def get(storage: Storage, name: str, *place: Any, file_id: str = FILE) -> bytes:
    pieces = [piece async for piece in storage.read(file_id, name, *place)]
    assert all(len(piece) <= CHUNK for piece in pieces)
    return b"".join(pieces)


async def put_and_fail(storage: Storage, size: int, failure: BaseException) -> None:
    async with storage.writing(FILE, "0") as writer:
        await writer.write(b"x" * size)
        raise failure


class StorageContract:
    """Tests of a fixture `storage`. large: bytes of an object that is written in parts."""

    large = 3 * CHUNK + 17

    async def test_an_object_is_read_as_it_was_written(self, storage: Storage) -> None:
        data = bytes(range(256)) * (self.large // 256) + b"end"
        await put(storage, "0", *(data[at : at + 100_000] for at in range(0, len(data), 100_000)))
        assert await get(storage, "0") == data
        for start, end in ((0, 1), (5, 5), (CHUNK - 1, CHUNK + 1), (len(data) - 3, None), (10, len(data) - 10)):
            assert await get(storage, "0", start, end) == data[start:end]

    async def test_small_and_empty_objects(self, storage: Storage) -> None:
        await put(storage, "a", b"one")
        await put(storage, "b", b"two")
        await put(storage, "c")
        assert [await get(storage, name) for name in "abc"] == [b"one", b"two", b""]

    async def test_an_object_that_is_not_complete_does_not_exist(self, storage: Storage) -> None:
        for failure in (RuntimeError("x"), asyncio.CancelledError()):
            with pytest.raises(type(failure)):
                await put_and_fail(storage, self.large, failure)
            with pytest.raises(StorageError):
                await get(storage, "0")
        await put(storage, "0", b"whole")
        assert await get(storage, "0") == b"whole"

    async def test_deleting_a_file_deletes_its_objects_alone(self, storage: Storage) -> None:
        other = "1" * 32
        await put(storage, "0", b"x")
        await put(storage, "1-abc", b"x")
        await put(storage, "0", b"other", file_id=other)
        await storage.delete(FILE)
        await storage.delete(FILE)
        for name in ("0", "1-abc"):
            with pytest.raises(StorageError):
                await get(storage, name)
        assert await get(storage, "0", file_id=other) == b"other"

    async def test_names_that_leave_the_folder_are_refused(self, storage: Storage) -> None:
        for file_id, name in (("..", "0"), (FILE, "../x"), ("a/b", "0")):
            with pytest.raises(ValueError, match="is no name"):
                await put(storage, name, b"x", file_id=file_id)
            with pytest.raises(ValueError, match="is no name"):
                await get(storage, name, file_id=file_id)
        with pytest.raises(ValueError, match="is no name"):
            await storage.delete("..")

    async def test_many_objects_at_once(self, storage: Storage) -> None:
        await asyncio.gather(*(put(storage, str(number), str(number).encode() * 1000) for number in range(20)))
        found = await asyncio.gather(*(get(storage, str(number)) for number in range(20)))
        assert found == [str(number).encode() * 1000 for number in range(20)]
