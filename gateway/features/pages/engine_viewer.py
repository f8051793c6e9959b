"""One reader of `/engine/stream`: the newest view of each worker that it has not been sent yet.

The newest view wins: a slow reader misses some views, and delays no other reader.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode

from quire.gateway.stream import sse
from quire.shared.protocol.views import KINDS, Row, View, unpack_table


class EngineViewer:
    """Holds the newest events for one reader."""

    def __init__(self) -> None:
        self._latest: dict[str, bytes] = {}
        self._has_events = asyncio.Event()
        # Views that were replaced by a newer one before they were sent.
        self.skipped = 0
        self.is_over = False

    def show(self, worker_id: str, event: bytes) -> None:
        """Send a view of a worker, unless a newer one of it arrives before the reader takes it."""
        self.skipped += worker_id in self._latest
        self._latest[worker_id] = event
        self._has_events.set()

    def end(self) -> None:
        """End the stream."""
        self.is_over = True
        self._has_events.set()

    async def next(self) -> bytes | None:
        """Wait for new events and take them. Returns None at the end."""
        await self._has_events.wait()
        self._has_events.clear()
        events = b"".join(self._latest.values())
        self._latest.clear()
        return None if self.is_over else events


def render(data: bytes, queues: dict[str, int]) -> bytes:
    """Render an encoded view as an event. Raise MessageError for a corrupt view.

    queues: waiting requests by priority class.
    """
    return sse.event(json.dumps(view_object(View.decode(data), queues), separators=(",", ":"))).encode()


def view_object(view: View, queues: dict[str, int]) -> dict[str, object]:
    """Return a view for JSON. Packed columns are base64; the tables of steps, which are short, are lists."""
    return {
        "worker": view.worker,
        "number": view.number,
        "limits": view.limits._asdict(),
        "figures": view.figures,
        "cells": {name: _base64(column) for name, column in view.cells._asdict().items()},
        "hidden_cells": view.hidden_cells,
        "sequences": [{**sequence._asdict(), "table": _base64(sequence.table)} for sequence in view.sequences],
        "hidden_sequences": view.hidden_sequences,
        "members": view.members,
        "steps": [[[_row(row) for row in step.rows], step.moves] for step in view.steps],
        "hidden_steps": view.hidden_steps,
        "queues": queues,
    }


def _row(row: Row) -> list[object]:
    """Return a row as [member, kind, tokens, filled, computed, accepted], then [start, table] if the table changed."""
    told = [row.member, KINDS.index(row.kind), row.tokens, row.filled, row.computed, row.accepted]
    return [*told, row.start, unpack_table(row.table)] if row.table else [*told]


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
