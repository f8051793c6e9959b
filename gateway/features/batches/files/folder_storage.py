"""Stores files in a folder, which all gateways of a Redis share: a local one, or one of a network file system."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from quire.gateway.features.batches.files.storage import CHUNK, ObjectWriter, StorageError, check_names
from quire.shared.process.errors import StartError

T = TypeVar("T")

# Begin of the names of objects that are being written.
DRAFT = ".draft-"


class FolderStorage:
    """The objects of a file are files of a folder with the file's id. All work on files is done in threads."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser()

    async def start(self) -> None:
        """Make the folder. Raises StartError if it cannot be written."""
        try:
            await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True, mode=0o700)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written")
        except OSError as error:
            raise StartError(
                f"--files-dir (QUIRE_FILES_DIR): {self._folder} cannot hold files: {error.strerror or error}; give "
                "a folder that this process can write"
            ) from error

    async def close(self) -> None:
        """Do nothing: no file is open between two calls."""

    @asynccontextmanager
    async def writing(self, file_id: str, name: str) -> AsyncIterator[ObjectWriter]:
        """Write an object under a name of its own, and rename it when it is complete and on the disk."""
        check_names(file_id, name)
        folder = self._folder / file_id
        draft = folder / f"{DRAFT}{secrets.token_hex(8)}"
        file = await _done(lambda: _create(draft), undo=lambda created: _drop(created, draft))
        try:
            yield _FileWriter(file)
            await _done(lambda: _finish(file, draft, folder / name))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(_drop, file, draft))
            raise

    async def read(self, file_id: str, name: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        check_names(file_id, name)
        path = self._folder / file_id / name
        file = await _done(lambda: _open(path, start), undo=lambda opened: opened.close())
        try:
            left = end - start if end is not None else None
            while left is None or left > 0:
                size = CHUNK if left is None else min(CHUNK, left)
                data = await _done(lambda size=size: file.read(size))  # type: ignore[misc]
                if not data:
                    break
                if left is not None:
                    left -= len(data)
                yield data
        finally:
            file.close()

    async def delete(self, file_id: str) -> None:
        check_names(file_id)
        folder = self._folder / file_id
        await _done(lambda: _remove(folder))


class _FileWriter:
    """Adds to an open file; small writes are collected by its buffer."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    async def write(self, data: bytes) -> None:
        await _done(lambda: self._file.write(data))


async def _done(work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Do work in a thread, and wait for its end even if the caller is cancelled. Raises StorageError.

    undo: called with the result if the caller was cancelled.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except OSError as error:
        raise StorageError(f"{error.strerror or error}") from error
    except asyncio.CancelledError:
        # The file must not be closed while the thread uses it.
        with suppress(Exception):
            await asyncio.wait([task])
            if task.exception() is None and undo is not None:
                undo(task.result())
        raise


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(exist_ok=True, mode=0o700)
    return open(path, "xb", buffering=CHUNK)


def _open(path: Path, start: int) -> BinaryIO:
    file = open(path, "rb", buffering=0)  # noqa: SIM115
    file.seek(start)
    return file


def _finish(file: BinaryIO, draft: Path, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
    draft.rename(path)
    for folder in (path.parent, path.parent.parent):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _drop(file: BinaryIO, draft: Path) -> None:
    with suppress(OSError):
        file.close()
    with suppress(OSError):
        draft.unlink()
    with suppress(OSError):
        draft.parent.rmdir()  # only if it is empty


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
