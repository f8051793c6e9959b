"""Bounds the lines of batches that a gateway has in flight, over all batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Waiting:
    """The lines of a window that wait for a slot."""

    count: int


class LineSlots:
    """A slot for each line in flight. `on_change` is called when slots are free and no line waits for one."""

    def __init__(self, count: int, on_change: Callable[[], None]) -> None:
        self.count = count
        self._semaphore = asyncio.Semaphore(count)
        self._on_change = on_change
        # Lines of begun windows without a slot, and lines with one.
        self.waiting = 0
        self.taken = 0

    @property
    def has_room(self) -> bool:
        """True if a slot is free and no line waits for it."""
        return not self.waiting and self.taken < self.count

    @contextmanager
    def window(self, lines: int) -> Iterator[Waiting]:
        """Count the lines of a window as waiting. Those that get no slot are forgotten at the end."""
        waiting = Waiting(lines)
        self.waiting += lines
        try:
            yield waiting
        finally:
            self.waiting -= waiting.count
            self._changed()

    @asynccontextmanager
    async def one(self, waiting: Waiting) -> AsyncIterator[None]:
        """Take a slot for one of the lines that wait."""
        await self._semaphore.acquire()
        waiting.count -= 1
        self.waiting -= 1
        self.taken += 1
        self._changed()
        try:
            yield
        finally:
            self.taken -= 1
            self._semaphore.release()
            self._changed()

    def _changed(self) -> None:
        if self.has_room:
            self._on_change()
