"""The store for the content of files: a folder or an S3 bucket.

A file is a set of objects with short names under its id. An object is written as a whole, or not at all, and is never
changed: so a reader needs no lock, and a gateway that dies leaves nothing that could be read.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

# Bytes that are read or written at once. A reader holds a few of them.
CHUNK = 256 * 1024
# The only object of an uploaded file.
WHOLE = "0"

_NAME = re.compile(r"[0-9a-z-]{1,64}", re.ASCII)


class StorageError(Exception):
    """The storage cannot be read or written now. The text names the reason."""


class ObjectWriter(Protocol):
    """Writes one object."""

    async def write(self, data: bytes) -> None:
        """Add bytes. Raises StorageError."""
        ...


class Storage(Protocol):
    """The objects of all files. Every method raises StorageError."""

    def writing(self, file_id: str, name: str) -> AbstractAsyncContextManager[ObjectWriter]:
        """Return a context that writes an object. It exists once the context was left without an exception."""
        ...

    def read(self, file_id: str, name: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes of an object from `start` to before `end`, in pieces of CHUNK at most."""
        ...

    async def delete(self, file_id: str) -> None:
        """Delete all objects of a file. A file without objects is no error."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def check_names(*names: str) -> None:
    """Raise ValueError unless all names can be part of a path: ids and names of objects are made by gateways."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a file or an object")
