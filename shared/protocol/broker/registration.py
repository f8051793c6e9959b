"""Registration of workers: a name belongs to one process at a time, which keeps it by heartbeats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from quire.shared.protocol.broker.lane import Lane, text
from quire.shared.protocol.keys import BEAT_S, WORKER_TTL_S
from quire.shared.protocol.messages import WorkerCard


@dataclass(frozen=True, slots=True)
class NameHolder:
    """The process that has a worker's name: incarnation, place, interval of beats, last beat (Redis time in ms)."""

    incarnation: str
    home: str
    beat_s: float
    beat_ms: int


class RegistrationVerbs(Lane):
    """The verbs about a worker's name and card."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._beat = self.script("beat")
        self._retire = self.script("retire")

    async def holder(self, worker_id: str) -> NameHolder | None:
        """Return the process that has a worker's name, or whose heartbeat has not expired; None for a free name."""
        fields = await self.client.hmget(self.keys.worker(worker_id), "incarnation", "home", "every", "beat")
        if any(field is None for field in fields):
            return None
        incarnation, home, beat_s, beat_ms = map(text, fields)
        return NameHolder(incarnation, home, float(beat_s), int(beat_ms))

    async def enlist(self, worker_id: str, incarnation: str, home: str, beat_s: float, before: str = "") -> bool:
        """Take a worker's name if it is free or belongs to the dead incarnation `before`; else return False.

        home: place of this process, for the next process that wants the name. beat_s: interval of `beat`.
        """
        keys = [self.keys.worker(worker_id), self.keys.workers]
        ttl_s = max(WORKER_TTL_S, math.ceil(3 * beat_s))
        args: list[Any] = [worker_id, incarnation, home, beat_s, "", ttl_s, before, self.keys.prefix]
        return bool(await self._beat(keys=keys, args=args))

    async def beat(self, card: WorkerCard, slowest_step_s: float = 0.0, home: str = "", beat_s: float = BEAT_S) -> bool:
        """Publish the worker's card and a heartbeat. Return False if another incarnation has the name by now.

        The worker counts as live for at least three of its slowest steps.
        """
        keys = [self.keys.worker(card.worker_id), self.keys.workers]
        ttl_s = max(WORKER_TTL_S, math.ceil(3 * max(beat_s, slowest_step_s)))
        args: list[Any] = [card.worker_id, card.incarnation, home, beat_s, card.encode(), ttl_s, "", self.keys.prefix]
        return bool(await self._beat(keys=keys, args=args))

    async def retire(self, worker_id: str, incarnation: str) -> None:
        """Retire a worker that ends: it stops counting as live, and its name is free."""
        keys = [self.keys.worker(worker_id), self.keys.mailbox(worker_id), self.keys.workers]
        await self._retire(keys=keys, args=[worker_id, incarnation, self.keys.prefix])
