"""Finds the cause of the silence of a request: no token was computed, or messages were lost.

Each open call is checked when it asks for that (`OutputBuffer.check`), so that an idle call costs nothing until then.
Silent requests are looked up in Redis in batches. A log is read only if it is ahead of the client, or if the request
has ended or is gone.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from typing import Any

from redis.exceptions import RedisError

from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.cursor import Cursor
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.states import RequestState
from quire.shared.redis.cancellation import check_cancelled

log = logging.getLogger("gateway")

# Time between two looks at the calls that are due.
TICK_S = 0.1
# Requests per round trip to Redis; bounds how long decoding the replies blocks the event loop.
BATCH = 64


class SilenceMonitor:
    """Checks open calls, from `start` to `close`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # A heap of checks by time. Only the one that `_due` has for a buffer is valid.
        self._checks: list[tuple[float, int, OutputBuffer]] = []
        self._due: dict[OutputBuffer, float] = {}
        # Breaks ties between checks at the same time, since buffers have no order.
        self._number = itertools.count()
        # Silent requests that are to be looked up, with the position of their client when they were found.
        self._silent: dict[Cursor, tuple[OutputBuffer, int]] = {}
        self._has_silent = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._tick_forever()), asyncio.create_task(self._look_up_forever())]

    async def close(self) -> None:
        await end_tasks(*self._tasks)

    def check_at(self, buffer: OutputBuffer, due: float) -> None:
        """Check a call at `due` on the loop's clock, or earlier."""
        if due < self._due.get(buffer, due + 1):
            self._due[buffer] = due
            heapq.heappush(self._checks, (due, next(self._number), buffer))

    def remove(self, buffer: OutputBuffer) -> None:
        """Stop checking a call."""
        self._due.pop(buffer, None)

    async def _tick_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(loop.time())

    def _tick(self, now: float) -> None:
        """Run the checks that are due."""
        while self._checks and self._checks[0][0] <= now:
            due, _, buffer = heapq.heappop(self._checks)
            if self._due.get(buffer) == due:
                del self._due[buffer]
                next_due, silent = buffer.check(now)
                self.check_at(buffer, next_due)
                for cursor in silent:
                    self._silent[cursor] = (buffer, cursor.next)
                    self._has_silent.set()

    async def _look_up_forever(self) -> None:
        while True:
            await self._has_silent.wait()
            self._has_silent.clear()
            while self._silent:
                batch = dict(itertools.islice(self._silent.items(), BATCH))
                for cursor in batch:
                    del self._silent[cursor]
                try:
                    await self._look_up(batch)
                except (RedisError, OSError) as error:  # the next check finds them silent again
                    log.debug("silent requests cannot be looked up now: %s", error)
                check_cancelled()

    async def _look_up(self, batch: dict[Cursor, tuple[OutputBuffer, int]]) -> None:
        """Have each log read that is ahead of its client; allow all other requests of the batch a longer silence."""
        keys = self._broker.keys
        pipe = self._broker.client.pipeline(transaction=False)
        for cursor, (_, position) in batch.items():
            pipe.xrange(keys.output(cursor.request_id), min=f"{position}-0", count=2)
            pipe.hget(keys.request(cursor.request_id), "state")
        # An error of one command concerns one request, and appears again when that request's log is read.
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for (cursor, (buffer, position)), entries, state in zip(
            batch.items(), replies[::2], replies[1::2], strict=True
        ):
            if cursor.next != position or cursor.ended:
                continue
            if text(state) in (RequestState.QUEUED, RequestState.RUNNING) and _has_nothing_after(position, entries):
                cursor.wait_longer()
            else:
                buffer.read_log_of(cursor)


def _has_nothing_after(position: int, entries: Any) -> bool:
    """Return True if the log has no token after `position`: each of `entries` is the entry that ends at `position`."""
    return isinstance(entries, list) and all(entry_id == b"%d-0" % position for entry_id, _ in entries)
