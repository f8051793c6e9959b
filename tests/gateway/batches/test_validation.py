"""The report of a validation, and where windows begin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.gateway.batches import validation
from quire.gateway.batches.batch_store import LinePlace
from quire.gateway.batches.line import BatchLine
from quire.gateway.batches.validation import MAX_ERRORS, WINDOW_LINES, Report, validate
from quire.gateway.errors.api_errors import refused
from tests.support.gateway.batch_calls import CHAT, chat_line, jsonl


def accept(line: BatchLine) -> None:
    pass


async def report(data: bytes, max_lines: int = 10_000, check: Any = accept, max_bytes: int = 10_000) -> Report:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    return await validate(chunks(), CHAT, check, max_lines, max_bytes)


async def test_windows_have_a_number_of_lines() -> None:
    data = jsonl([chat_line(number) for number in range(2 * WINDOW_LINES + 1)])
    found = await report(data)
    assert (found.errors, found.lines) == ([], 2 * WINDOW_LINES + 1)
    lines = data.splitlines(keepends=True)
    offsets = [sum(map(len, lines[:count])) for count in (0, WINDOW_LINES, 2 * WINDOW_LINES, len(lines))]
    assert found.places == [
        LinePlace(offsets[0], 1),
        LinePlace(offsets[1], WINDOW_LINES + 1),
        LinePlace(offsets[2], 2 * WINDOW_LINES + 1),
        LinePlace(offsets[3], len(lines) + 1),
    ]


async def test_windows_have_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "WINDOW_BYTES", 3000)
    found = await report(jsonl([chat_line(number, user="x" * 1000) for number in range(10)]))
    assert [place.number for place in found.places] == [1, 4, 7, 10, 11]


async def test_an_input_without_lines_is_wrong() -> None:
    for data in (b"\n", b" \n\n\t"):
        assert [one["code"] for one in (await report(data)).errors] == ["empty_file"]


async def test_too_many_lines() -> None:
    (error,) = (await report(jsonl([chat_line(number) for number in range(5)]), max_lines=4)).errors
    assert (error["code"], error["line"]) == ("too_many_lines", 5)
    assert "--max-batch-lines" in error["message"]


async def test_a_report_is_bounded() -> None:
    def check(line: BatchLine) -> None:
        raise refused("x", "m" * 10_000)

    found = await report(jsonl([chat_line(number) for number in range(3 * MAX_ERRORS)]), check=check)
    assert len(found.errors) == MAX_ERRORS
    assert {len(one["message"]) for one in found.errors} == {validation.MAX_MESSAGE}


async def test_a_line_that_is_too_long() -> None:
    found = await report(jsonl([chat_line(1), chat_line(2, user="x" * 2000), chat_line(3)]), max_bytes=500)
    assert [(one["line"], one["code"]) for one in found.errors] == [(2, "line_too_long")]
