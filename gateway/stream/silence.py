"""When to look after which call, and what silence means, asked of Redis for many requests at once.

A call says when it wants to be checked (`OutputBuffer.check`), so that calls at rest cost nothing until then. A request
that has been silent is not read by its own call: this module asks Redis in batches whether its log is ahead of the
client. Only a call whose log has more, or whose request has ended or is gone, is told to look.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from quire.gateway.stream.cancellation import check_cancelled
from quire.gateway.stream.cursor import Cursor
from quire.shared.broker import Broker

if TYPE_CHECKING:
    from quire.gateway.stream.buffer import OutputBuffer

log = logging.getLogger("gateway")

TICK_S = 0.1
# Requests in one question to Redis, so that the event loop is not held up for long.
BATCH = 64


class SilenceMonitor:
    """Checks the calls that were added, from `start` to `close`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # Times of checks, the next first, and by call the one that holds: others are out of date.
        self._checks: list[tuple[float, int, OutputBuffer]] = []
        self._due: dict[OutputBuffer, float] = {}
        self._number = itertools.count()
        # Silent requests, and how far their clients were.
        self._silent: dict[Cursor, tuple[OutputBuffer, int]] = {}
        self._asks = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._tick_forever()), asyncio.create_task(self._ask_forever())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, outputs: OutputBuffer, due: float) -> None:
        """Check a call at `due` on the loop's clock, or before."""
        if due < self._due.get(outputs, due + 1):
            self._due[outputs] = due
            heapq.heappush(self._checks, (due, next(self._number), outputs))

    def remove(self, outputs: OutputBuffer) -> None:
        """The call is over."""
        self._due.pop(outputs, None)

    def ask(self, outputs: OutputBuffer, cursor: Cursor) -> None:
        """A request is silent: is there more of it?"""
        self._silent[cursor] = (outputs, cursor.next)
        self._asks.set()

    async def _tick_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(loop.time())

    def _tick(self, now: float) -> None:
        while self._checks and self._checks[0][0] <= now:
            due, _, outputs = heapq.heappop(self._checks)
            if self._due.get(outputs) == due:
                del self._due[outputs]
                self.add(outputs, outputs.check(now))

    async def _ask_forever(self) -> None:
        while True:
            await self._asks.wait()
            self._asks.clear()
            while self._silent:
                batch = dict(itertools.islice(self._silent.items(), BATCH))
                for cursor in batch:
                    del self._silent[cursor]
                try:
                    await self._ask(batch)
                except (RedisError, OSError) as error:  # they are asked for again when they have been silent for longer
                    log.debug("silent requests cannot be looked at now: %s", error)
                check_cancelled()

    async def _ask(self, batch: dict[Cursor, tuple[OutputBuffer, int]]) -> None:
        keys = self._broker.keys
        pipe = self._broker.client.pipeline(transaction=False)
        for cursor, (_, at) in batch.items():
            pipe.xrange(keys.output(cursor.request_id), min=f"{at}-0", count=2)
            pipe.hget(keys.request(cursor.request_id), "state")
        # What is wrong with one of them its own call finds out.
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for (cursor, (outputs, at)), entries, state in zip(batch.items(), replies[::2], replies[1::2], strict=True):
            if cursor.next != at or cursor.ended:
                continue
            if state in (b"queued", b"running") and _has_nothing_after(at, entries):
                cursor.wait_longer()
            else:
                outputs.look(cursor)


def _has_nothing_after(at: int, entries: Any) -> bool:
    """Whether the first entries of a log from token `at` on are at most the one that ends there."""
    return isinstance(entries, list) and all(entry_id == b"%d-0" % at for entry_id, _ in entries)
