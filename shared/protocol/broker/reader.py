"""Reads the queues for one worker. Its entries must still be claimed (`shared/protocol/broker/worker.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from quire.shared.protocol.broker.affinity import LeftStream
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.broker.scripts import load_script
from quire.shared.protocol.keys import GROUP, QUEUES, LaneKeys


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """A stream entry that is pending for this worker and not claimed yet. `queue` is one of QUEUES.

    rows: sequences that the request runs at once.
    """

    queue: str
    entry_id: str
    request_id: str
    cost: int
    rows: int = 1


class QueueReader:
    """Reads the queues of a lane for one worker, over a blocking connection of its own. Never cancel `read`."""

    def __init__(self, client: Redis, lane: str, worker_id: str) -> None:
        self.client = client
        self.keys = LaneKeys(lane)
        self.worker_id = worker_id
        self._connection_id: int | None = None
        self._read_now = load_script(client, "read")
        self._was_empty = False
        # The next request, if the last `read` left it because it has more rows than were asked for; else ''.
        self.too_wide = ""
        # Entries of the stream `wake` that this worker has read and not yet acknowledged.
        self._wakes: list[str] = []
        self._left = LeftStream(self.keys.left(worker_id))

    async def unblock(self, commands: Redis) -> None:
        """End a blocking `read` in progress, by a command on another connection. The read returns no entries."""
        if self._connection_id is not None:
            with suppress(RedisError, OSError):  # then the read ends at its timeout
                await commands.client_unblock(self._connection_id)

    async def pending(self) -> list[StreamEntry]:
        """Return the entries that are pending for this worker. Call it at start and after a failed read."""
        self._connection_id = await self.client.client_id()
        await self._left.open(self.client)
        return await self._read(QUEUES, start="0")

    async def read(
        self, rows: int, block_ms: int, queues: Sequence[str] = QUEUES, widest: int | None = None
    ) -> list[StreamEntry]:
        """Return new requests with up to `rows` rows, from the first of `queues` first; wait up to `block_ms`.

        widest: rows that the first request may have, by default `rows`. A request with more rows than are left stays in
        Redis; `too_wide` names it, no request after it is read, and the read does not block.
        A request that was handed back is read whatever its rows, as long as a row is left. A read that blocked returns
        at most one request per queue. In both cases the requests may have more than `rows` rows.
        """
        widest = rows if widest is None else widest
        self.too_wide = ""
        # After a blocking read that found nothing, little can have arrived: block immediately. A blocking read returns
        # at most one entry per queue, so the read after it polls again.
        is_idle = self._was_empty and block_ms > 0 and rows >= len(queues)
        entries = [] if is_idle else await self._poll(rows, widest, queues)
        if entries or self.too_wide or block_ms <= 0:
            return entries
        entries = await self._read(queues, start=">", count=1, block_ms=block_ms)
        if not entries and self._wakes:  # requests wait in lines
            entries = await self._poll(rows, widest, queues)
        self._was_empty = not entries and not self.too_wide
        return entries

    async def wait(self, queues: Sequence[str], block_ms: int) -> list[StreamEntry]:
        """Block up to `block_ms` for a new request in one of `queues`. Call it after a `read` of them that found none.

        A full worker calls it for the classes that may displace others. It does not read `wake`: requests of
        other classes may wait in lines all the time, and would end each wait. A request that arrives while others of
        its class are unread goes into a line, where only the next `read` finds it. Return at most one request.
        """
        return await self._read(queues, start=">", count=1, block_ms=block_ms, wakes=False)

    async def _poll(self, rows: int, widest: int, queues: Sequence[str]) -> list[StreamEntry]:
        wakes, self._wakes = self._wakes, []
        *reply, too_wide = await self._read_now(
            keys=[self.keys.queue(name) for name in queues],
            args=[self.worker_id, max(0, rows), self.keys.prefix, widest, len(wakes), *wakes, *self._left.taken()],
        )
        self.too_wide = text(too_wide)
        return [
            read_entry(name, entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
            for name, entries in zip(queues, reply, strict=True)
            for entry_id, fields in entries
        ]

    async def _read(
        self,
        queues: Sequence[str],
        *,
        start: str,
        count: int | None = None,
        block_ms: int | None = None,
        wakes: bool = True,
    ) -> list[StreamEntry]:
        by_stream = {self.keys.queue(name): name for name in queues}
        streams: dict[Any, Any] = dict.fromkeys((*by_stream, *self._left.streams, *[self.keys.wake] * wakes), start)
        reply: Any = await self.client.xreadgroup(GROUP, self.worker_id, streams, count=count, block=block_ms)
        unclaimed = []
        for stream, entries in reply or []:
            if text(stream) == self.keys.wake:
                self._wakes += [text(entry_id) for entry_id, _ in entries]
            elif text(stream) in self._left.streams:
                unclaimed += [read_entry(*left) for left in self._left.take(entries)]
            else:
                unclaimed += [read_entry(by_stream[text(stream)], entry_id, fields) for entry_id, fields in entries]
        return unclaimed


def read_entry(queue: str, entry_id: Any, fields: Any) -> StreamEntry:
    """Decode a stream entry."""
    fields = fields or {}  # an entry that was deleted while it was pending; claim removes it
    request_id, cost, rows = text(fields.get(b"id", b"")), fields.get(b"cost", b"0"), fields.get(b"rows", b"1")
    cost, rows = (int(number) if number.isdigit() else 0 for number in (cost, rows))
    return StreamEntry(queue, text(entry_id), request_id, cost, max(1, rows))
