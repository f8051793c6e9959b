"""Reads the little-endian values of a GGUF header one after the other, within the bounds of the file."""

from __future__ import annotations

import struct
from pathlib import Path

from quire.shared.model.gguf.types import ARRAY, BOOL, SCALARS, STRING
from quire.shared.process.errors import FileError

MAX_STRING_BYTES = 16 << 20  # chat templates are the longest strings
MAX_STRINGS = 4 << 20  # in all arrays together; the largest vocabularies have some 300,000 tokens and as many merges
MAX_ELEMENTS = 16 << 20  # of one array

Scalar = int | float | bool | str


class HeaderCursor:
    """A position in a file. Every error names the file and the field that is read."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path, self._data = path, data
        self.position = 0
        self._num_strings = 0

    def fault(self, field: str, what: str, expected: str) -> FileError:
        return FileError(self._path, f"{field} {what}, expected {expected}")

    def take(self, size: int, field: str) -> int:
        """Pass `size` bytes, and return the position of the first."""
        start = self.position
        if size > len(self._data) - start:
            raise self.fault(field, "ends past the end of the file", f"{size} bytes at byte {start}")
        self.position += size
        return start

    def number(self, kind: int, field: str) -> int | float | bool:
        """Read a number of a type of SCALARS."""
        form = SCALARS[kind][1]
        value: int | float = struct.unpack_from(form, self._data, self.take(struct.calcsize(form), field))[0]
        if kind == BOOL:
            if value not in (0, 1):
                raise self.fault(field, f"is {value}", "0 or 1 for a bool")
            return bool(value)
        return value

    def integer(self, kind: int, field: str, minimum: int, maximum: int) -> int:
        value = int(self.number(kind, field))
        if not minimum <= value <= maximum:
            raise self.fault(field, f"is {value}", f"{minimum} to {maximum}")
        return value

    def text(self, field: str, maximum: int = MAX_STRING_BYTES) -> str:
        """Read a string of at most `maximum` bytes."""
        size = self.integer(10, f"length of {field}", 0, maximum)
        start = self.take(size, field)
        try:
            return bytes(self._data[start : start + size]).decode()
        except UnicodeDecodeError:
            raise self.fault(field, "is not UTF-8", "a string in UTF-8") from None

    def value(self, kind: int, field: str) -> Scalar:
        """Read a string or a number."""
        return self.text(field) if kind == STRING else self.number(kind, field)

    def skip_array(self, field: str) -> tuple[int, int, int]:
        """Pass an array. Returns the type of its elements, their number, and the position of the first."""
        kind = self.integer(4, f"element type of {field}", 0, 12)
        if kind == ARRAY:
            raise self.fault(field, "is an array of arrays", "an array of strings or numbers")
        count = self.integer(10, f"length of {field}", 0, MAX_ELEMENTS)
        first = self.position
        if kind != STRING:
            self.take(count * struct.calcsize(SCALARS[kind][1]), field)
            return kind, count, first
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise self.fault(field, f"brings the strings in arrays to {self._num_strings}", f"at most {MAX_STRINGS}")
        for _ in range(count):
            size = self.integer(10, f"length of a string in {field}", 0, MAX_STRING_BYTES)
            self.take(size, field)
        return kind, count, first
