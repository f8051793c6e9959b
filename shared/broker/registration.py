"""Who lives under a worker's name: one process at a time, which beats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from quire.shared.broker.lane import Lane, text
from quire.shared.messages import WorkerCard

# A worker that has not beaten for so long is not counted as making progress.
WORKER_TTL_S = 5
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class NameHolder:
    """The process that has a worker's name: which one, where it runs, how often it beats, its last beat (Redis ms)."""

    incarnation: str
    home: str
    beat_s: float
    beat_ms: int


class NameVerbs(Lane):
    """The verbs about a worker's name and card."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._beat = self.script("beat")
        self._retire = self.script("retire")

    async def holder(self, worker_id: str) -> NameHolder | None:
        """The process that lives under a worker's name, or has until lately; None if there is none."""
        fields = await self.client.hmget(self.keys.worker(worker_id), "incarnation", "home", "every", "beat")
        if any(field is None for field in fields):
            return None
        incarnation, home, beat_s, beat_ms = map(text, fields)
        return NameHolder(incarnation, home, float(beat_s), int(beat_ms))

    async def enlist(self, worker_id: str, incarnation: str, home: str, beat_s: float, before: str = "") -> bool:
        """Take a worker's name, which is free or that of the dead incarnation `before`; False if another one has it.

        home: where this process runs, for whoever wants the name next. beat_s: how often `beat` will be called.
        """
        keys = [self.keys.worker(worker_id), self.keys.workers]
        ttl_s = max(WORKER_TTL_S, math.ceil(3 * beat_s))
        args: list[Any] = [worker_id, incarnation, home, beat_s, "", ttl_s, before, self.keys.prefix]
        return bool(await self._beat(keys=keys, args=args))

    async def beat(self, card: WorkerCard, slowest_step_s: float = 0.0, home: str = "", beat_s: float = BEAT_S) -> bool:
        """Publish the worker's card and its progress; False if another incarnation has the name by now.

        It counts as live for three of its slowest steps at least.
        """
        keys = [self.keys.worker(card.worker_id), self.keys.workers]
        ttl_s = max(WORKER_TTL_S, math.ceil(3 * max(beat_s, slowest_step_s)))
        args: list[Any] = [card.worker_id, card.incarnation, home, beat_s, card.encode(), ttl_s, "", self.keys.prefix]
        return bool(await self._beat(keys=keys, args=args))

    async def retire(self, worker_id: str, incarnation: str) -> None:
        """A worker that ends stops counting as live at once, and its name is free."""
        keys = [self.keys.worker(worker_id), self.keys.mailbox(worker_id), self.keys.workers]
        await self._retire(keys=keys, args=[worker_id, incarnation, self.keys.prefix])
