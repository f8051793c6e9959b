"""Reads the queues for one worker. The entries that it returns must still be claimed (`shared/broker/worker.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from quire.shared.broker.lane import text
from quire.shared.broker.scripts import load_script
from quire.shared.keys import GROUP, QUEUES, LaneKeys


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """A stream entry that is pending for this worker and not claimed yet. `queue` is one of QUEUES."""

    queue: str
    entry_id: str
    request_id: str
    cost: int


class QueueReader:
    """Reads the queues of a lane for one worker, over a blocking connection of its own. Never cancel `read`."""

    def __init__(self, client: Redis, lane: str, worker_id: str) -> None:
        self.client = client
        self.keys = LaneKeys(lane)
        self.worker_id = worker_id
        self._connection_id: int | None = None
        self._read_now = load_script(client, "read")
        self._was_empty = False

    async def unblock(self, commands: Redis) -> None:
        """End a blocking `read` in progress, by a command on another connection. The read returns no entries."""
        if self._connection_id is not None:
            with suppress(RedisError, OSError):  # then the read ends at its timeout
                await commands.client_unblock(self._connection_id)

    async def pending(self) -> list[StreamEntry]:
        """Return the entries that are pending for this worker. Call it at start and after a failed read."""
        self._connection_id = await self.client.client_id()
        return await self._read(QUEUES, start="0")

    async def read(self, count: int, block_ms: int, queues: Sequence[str] = QUEUES) -> list[StreamEntry]:
        """Return up to `count` new requests, from the first of `queues` first; block up to `block_ms` for one.

        A read that blocked returns at most one request per queue, so it may exceed `count`.
        """
        # After a blocking read that found nothing, little can have arrived: block immediately. A blocking read returns
        # at most one entry per queue, so the read after it polls again.
        if self._was_empty and block_ms > 0 and count >= len(queues):
            found = await self._read(queues, start=">", count=1, block_ms=block_ms)
            self._was_empty = not found
            return found
        reply: Any = await self._read_now(
            keys=[self.keys.queue(name) for name in queues], args=[self.worker_id, max(0, count)]
        )
        found = [
            read_entry(name, entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
            for name, entries in zip(queues, reply, strict=True)
            for entry_id, fields in entries
        ]
        if found or block_ms <= 0:
            return found
        self._was_empty = True
        return await self._read(queues, start=">", count=1, block_ms=block_ms)

    async def _read(
        self, queues: Sequence[str], *, start: str, count: int | None = None, block_ms: int | None = None
    ) -> list[StreamEntry]:
        streams: dict[Any, Any] = {self.keys.queue(name): start for name in queues}
        by_stream = {self.keys.queue(name): name for name in queues}
        reply: Any = await self.client.xreadgroup(GROUP, self.worker_id, streams, count=count, block=block_ms)
        return [
            read_entry(by_stream[text(stream)], entry_id, fields)
            for stream, entries in reply or []
            for entry_id, fields in entries
        ]


def read_entry(queue: str, entry_id: Any, fields: Any) -> StreamEntry:
    """Decode a stream entry."""
    fields = fields or {}  # an entry that was deleted while it was pending; claim removes it
    request_id, cost = text(fields.get(b"id", b"")), fields.get(b"cost", b"0")
    return StreamEntry(queue, text(entry_id), request_id, int(cost) if cost.isdigit() else 0)
