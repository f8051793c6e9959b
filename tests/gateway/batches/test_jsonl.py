"""A stream of bytes becomes the same lines, however it is cut."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.batches.batch_store import LinePlace
from quire.gateway.batches.jsonl import RawLine, read_lines
from quire.gateway.files.storage import CHUNK

LINES = st.binary(max_size=20).filter(lambda line: b"\n" not in line)


async def stream(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def split(data: bytes, size: int, most: int = 100) -> list[RawLine | LinePlace]:
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    return [one async for one in read_lines(stream(chunks), most, LinePlace(0, 1))]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_places_and_blank_lines(size: int) -> None:
    found = await split(b'{"a":1}\n\n \t\r\n{"b":2}\r\nlast', size)
    assert found == [
        RawLine(LinePlace(0, 1), b'{"a":1}', line=1),
        RawLine(LinePlace(13, 2), b'{"b":2}\r', line=4),
        RawLine(LinePlace(22, 3), b"last", line=5),
        LinePlace(26, 4),
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_found(size: int) -> None:
    first, *rest = await split(b"x" * 500 + b"\nnext\n", size, most=10)
    assert isinstance(first, RawLine)
    assert (first.is_too_long, first.place) == (True, LinePlace(0, 1))
    assert rest == [RawLine(LinePlace(501, 2), b"next", line=2), LinePlace(506, 3)]


@pytest.mark.parametrize("length", [9, 10, 11])
async def test_the_longest_line(length: int) -> None:
    for end in (b"", b"\n"):
        line, _ = await split(b"x" * length + end, 3, most=10)
        assert isinstance(line, RawLine)
        assert line.is_too_long == (length > 10)


async def test_an_empty_stream_has_an_end() -> None:
    assert await split(b"", 1) == [LinePlace(0, 1)]


@settings(deadline=None)
@given(lines=st.lists(LINES, max_size=20), size=st.integers(1, 40))
async def test_lines_are_those_of_the_text_and_a_window_reads_its_part(lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    *found, end = await split(data, size)
    assert isinstance(end, LinePlace)
    assert end.offset == len(data)
    raw = [one for one in found if isinstance(one, RawLine)]
    assert [one.data for one in raw] == [line for line in lines if line.strip(b" \t\r")]
    for number, one in enumerate(raw, start=1):
        assert data[one.place.offset :].startswith(one.data)
        assert lines[one.line - 1] == one.data
        assert one.place.number == number
    # Reading from the place of any line gives that line and those after it, with their numbers.
    for index, one in enumerate(raw):
        rest = read_lines(stream([data[one.place.offset :]]), 100, one.place)
        again = [line async for line in rest if isinstance(line, RawLine)]
        assert [replace(line, line=0) for line in again] == [replace(line, line=0) for line in raw[index:]]


@pytest.mark.parametrize("blank", [b"\n", b" \r\n", b" "], ids=repr)
async def test_thirty_megabytes_of_white_space_are_skipped_at_once(blank: bytes) -> None:
    """The event loop stands still only while a piece is searched."""
    data, most = blank * (30_000_000 // len(blank)), 0.0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal most
        for at in range(0, len(data), CHUNK):
            began = time.process_time()
            yield data[at : at + CHUNK]
            most = max(most, time.process_time() - began)
        yield b"\nlast\n"

    began = time.process_time()
    found = [one async for one in read_lines(pieces(), 4_194_304, LinePlace(0, 1))]
    assert time.process_time() - began < 3  # 20 s if each line costs
    assert most < 0.05
    line, end = found
    assert isinstance(line, RawLine)
    assert (line.data, line.place.number, line.line) == (b"last", 1, data.count(b"\n") + 2)
    assert end == LinePlace(len(data) + 6, 2)
