"""A stream of bytes becomes the same lines, however it is cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.batches.batch_store import LinePlace
from quire.gateway.batches.jsonl import RawLine, read_lines

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
        RawLine(LinePlace(0, 1), b'{"a":1}'),
        RawLine(LinePlace(13, 4), b'{"b":2}\r'),
        RawLine(LinePlace(22, 5), b"last"),
        LinePlace(26, 6),
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_found(size: int) -> None:
    first, *rest = await split(b"x" * 500 + b"\nnext\n", size, most=10)
    assert isinstance(first, RawLine)
    assert (first.is_too_long, first.place) == (True, LinePlace(0, 1))
    assert rest == [RawLine(LinePlace(501, 2), b"next"), LinePlace(506, 3)]


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
    for one in raw:
        assert data[one.place.offset :].startswith(one.data)
        assert lines[one.place.line - 1] == one.data
    # Reading from the place of any line gives that line and those after it, with their numbers.
    for index, one in enumerate(raw):
        rest = read_lines(stream([data[one.place.offset :]]), 100, one.place)
        again = [line async for line in rest if isinstance(line, RawLine)]
        assert again == raw[index:]
