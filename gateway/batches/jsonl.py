"""Splits a stream of bytes into lines, of which it holds one at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire.gateway.batches.batch_store import LinePlace

# White space around a value in JSON, without the end of a line.
BLANK = b" \t\r"


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line without its end. place: where it begins. is_too_long: `data` is only its beginning."""

    place: LinePlace
    data: bytes
    is_too_long: bool = False


async def read_lines(chunks: AsyncIterator[bytes], most: int, begin: LinePlace) -> AsyncIterator[RawLine | LinePlace]:
    """Yield the lines that are not blank, then the place after the last one. most: bytes of a line.

    The last line needs no line feed. begin: of the stream in its file.
    """
    waiting = bytearray()
    offset, number, dropped = begin.offset, begin.line, 0
    async for chunk in chunks:
        start = 0
        while (at := chunk.find(b"\n", start)) >= 0:
            waiting += chunk[start:at]
            size = len(waiting) + dropped
            if waiting.strip(BLANK):
                yield RawLine(LinePlace(offset, number), bytes(waiting), size > most)
            waiting.clear()
            offset, number, dropped, start = offset + size + 1, number + 1, 0, at + 1
        waiting += chunk[start:]
        if len(waiting) > most + 1:
            dropped += len(waiting) - most - 1
            del waiting[most + 1 :]
    if waiting.strip(BLANK):
        yield RawLine(LinePlace(offset, number), bytes(waiting), len(waiting) + dropped > most)
    if waiting:
        offset, number = offset + len(waiting) + dropped, number + 1
    yield LinePlace(offset, number)
