"""One reader of `/engine/stream`: the events that it has not been sent yet, at most one of each kind.

The newest view wins: a slow reader misses some views, and delays no other reader.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode

from quire.gateway.stream import sse
from quire.shared.protocol.views import View


class EngineViewer:
    """Holds the newest events for one reader."""

    def __init__(self) -> None:
        self._claim: bytes | None = None
        self._latest: bytes | None = None
        self._has_events = asyncio.Event()
        # Views that were replaced by a newer one before they were sent.
        self.skipped = 0
        self.is_over = False

    def show(self, event: bytes) -> None:
        """Send a view, unless a newer one arrives before the reader takes it."""
        self.skipped += self._latest is not None
        self._latest = event
        self._has_events.set()

    def show_claim(self, key: str, worker_id: str) -> None:
        """Send which worker has claimed the followed request. Drops a view not sent yet: it is of another worker."""
        claim = sse.event(json.dumps({"follow": key, "worker": worker_id}))
        self._claim, self._latest = f"event: claimed\n{claim}".encode(), None
        self._has_events.set()

    def end(self) -> None:
        """End the stream."""
        self.is_over = True
        self._has_events.set()

    async def next(self) -> bytes | None:
        """Wait for new events and take them. Returns None at the end."""
        await self._has_events.wait()
        self._has_events.clear()
        events = (self._claim or b"") + (self._latest or b"")
        self._claim = self._latest = None
        return None if self.is_over else events


def render(view: View, queues: dict[str, int]) -> bytes:
    """Render a view as an event; packed columns are base64. `queues`: waiting requests by priority class."""
    value = {
        "worker": view.worker,
        "number": view.number,
        "limits": view.limits._asdict(),
        "figures": view.figures,
        "cells": {name: _base64(column) for name, column in view.cells._asdict().items()},
        "hidden_cells": view.hidden_cells,
        "sequences": [{**sequence._asdict(), "table": _base64(sequence.table)} for sequence in view.sequences],
        "hidden_sequences": view.hidden_sequences,
        "batch": [row._asdict() for row in view.batch],
        "hidden_rows": view.hidden_rows,
        "steps": view.steps,
        "moves": [move._asdict() for move in view.moves],
        "hidden_moves": view.hidden_moves,
        "queues": queues,
    }
    return sse.event(json.dumps(value, separators=(",", ":"))).encode()


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
