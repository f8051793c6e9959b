"""Reads the whole input of a batch before any line runs: what is wrong in which line, and where the windows begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from quire.gateway.errors.api_errors import ApiError
from quire.gateway.features.batches.batch_store import LinePlace
from quire.gateway.features.batches.custom_ids import CustomIds
from quire.gateway.features.batches.jsonl import read_lines
from quire.gateway.features.batches.line import BatchLine, read_line

# Bounds of a window, in lines and in bytes.
WINDOW_LINES = 256
WINDOW_BYTES = 1024 * 1024
# Errors of a report; further lines are not read.
MAX_ERRORS = 100
# Characters of the message of an error.
MAX_MESSAGE = 500
# Bytes that are read before other tasks run.
SLICE_BYTES = 16 * 1024


@dataclass(slots=True)
class Report:
    """The result of a validation. places: where each window begins, and the end. lines: those that are not blank."""

    errors: list[dict[str, Any]] = field(default_factory=list)
    places: list[LinePlace] = field(default_factory=list)
    lines: int = 0

    def add(self, line: int | None, message: str, *, code: str, param: str | None = None) -> None:
        self.errors.append({"code": code, "message": message[:MAX_MESSAGE], "param": param, "line": line})


async def validate(
    chunks: AsyncIterator[bytes], endpoint: str, check: Callable[[BatchLine], None], max_lines: int, max_bytes: int
) -> Report:
    """Validate the input of a batch.

    check: raises ApiError for a line whose call is wrong. max_lines: of the input. max_bytes: of a line.
    """
    report, ids = Report(), CustomIds()
    window_lines, window_from, rested_at = 0, 0, 0
    async for raw in read_lines(chunks, max_bytes, LinePlace(0, 1)):
        if isinstance(raw, LinePlace):
            report.places.append(raw)
            break
        offset = raw.place.offset
        report.lines += 1
        if report.lines > max_lines:
            report.add(
                raw.line,
                f"The file has more than {max_lines} lines (this server's setting --max-batch-lines).",
                code="too_many_lines",
            )
            break
        try:
            line = read_line(raw, endpoint, max_bytes)
            check(line)
        except ApiError as error:
            report.add(raw.line, error.message, code=error.code or "invalid_value", param=error.param)
        else:
            if not ids.add(line.custom_id):
                message = "An earlier line has the same custom_id."
                report.add(raw.line, message, code="duplicate_custom_id", param="custom_id")
        if len(report.errors) >= MAX_ERRORS:
            break
        if not report.places or window_lines >= WINDOW_LINES or offset - window_from >= WINDOW_BYTES:
            report.places.append(raw.place)
            window_lines, window_from = 0, offset
        window_lines += 1
        if offset - rested_at >= SLICE_BYTES:
            rested_at = offset
            await asyncio.sleep(0)
    if not report.lines and not report.errors:
        report.add(None, "The file has no lines.", code="empty_file")
    return report
