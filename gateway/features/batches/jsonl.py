"""Splits a stream of bytes into lines, of which it holds one at a time."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire.gateway.features.batches.batch_store import LinePlace

# White space around a value in JSON, without the end of a line.
BLANK = b" \t\r"
_BLANKS = re.compile(rb"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line without its end.

    place: where it begins. is_too_long: `data` is only its beginning. line: its number among all lines of the stream,
    for people.
    """

    place: LinePlace
    data: bytes
    is_too_long: bool = False
    line: int = 0


async def read_lines(chunks: AsyncIterator[bytes], most: int, begin: LinePlace) -> AsyncIterator[RawLine | LinePlace]:
    """Yield the lines that are not blank, then the place after the last one. most: bytes of a line.

    The last line needs no line feed. begin: of the stream in its file. Blank lines between two others are skipped at
    once, because a file may have a billion of them.
    """
    waiting = bytearray()
    offset, number, line, dropped = begin.offset, begin.number, 1, 0
    async for chunk in chunks:
        start = 0
        while True:
            if not waiting and (passed := _blank_lines(chunk, start)):
                line += chunk.count(b"\n", start, start + passed)
                offset, start = offset + passed, start + passed
            if (at := chunk.find(b"\n", start)) < 0:
                break
            waiting += chunk[start:at]
            size = len(waiting) + dropped
            if waiting.strip(BLANK):
                yield RawLine(LinePlace(offset, number), bytes(waiting), size > most, line)
                number += 1
            waiting.clear()
            offset, line, dropped, start = offset + size + 1, line + 1, 0, at + 1
        waiting += chunk[start:]
        if len(waiting) > most + 1:
            dropped += len(waiting) - most - 1
            del waiting[most + 1 :]
    if waiting.strip(BLANK):
        yield RawLine(LinePlace(offset, number), bytes(waiting), len(waiting) + dropped > most, line)
        number += 1
    yield LinePlace(offset + len(waiting) + dropped, number)


def _blank_lines(chunk: bytes, start: int) -> int:
    """Return the size of the blank lines at a place, with their ends."""
    blanks = _BLANKS.match(chunk, start)
    assert blanks is not None
    return max(0, chunk.rfind(b"\n", start, blanks.end()) + 1 - start)
