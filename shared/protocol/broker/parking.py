"""The verbs about parked requests: they keep their tokens while no worker computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from quire.shared.protocol.admission import QueueBounds
from quire.shared.protocol.broker.gateway import check_refusal
from quire.shared.protocol.broker.lane import Lane, text
from quire.shared.protocol.keys import PARKING_S, QUEUES, RETENTION_S, WAITING_QUEUES
from quire.shared.protocol.states import ParkReply, UnparkReply

# What an operator parks or unparks is never refused for want of room.
NO_BOUNDS = QueueBounds(10**12, 10**15, stored_bytes=0)


@dataclass(frozen=True, slots=True)
class ParkedRequest:
    """A parked request. left_s: seconds until it ends as parked. metadata: of its call."""

    request_id: str
    left_s: float
    emitted: int
    priority_class: str
    metadata: bytes


class ParkingVerbs(Lane):
    """The verbs about parked requests."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._park = self.script("park")
        self._unpark = self.script("unpark")

    async def park(
        self,
        request_id: str,
        *,
        retention_s: int = PARKING_S,
        max_parked: int = 0,
        max_parked_of_key: int = 0,
        bounds: QueueBounds = NO_BOUNDS,
        attempt: str = "",
    ) -> ParkReply:
        """Park a request, waiting or running.

        retention_s: time after which it ends unless it is unparked. max_parked, max_parked_of_key: largest number of
        parked requests of the lane, and of one API key; 0 is any number. attempt: park only if this is the present
        attempt.
        """
        args: list[Any] = [self.keys.prefix, request_id, retention_s, max_parked, attempt, RETENTION_S]
        args += [max_parked_of_key, bounds.stored_bytes, bounds.key_bytes]
        return ParkReply(text(await self._park(keys=[self.keys.request(request_id)], args=args)))

    async def unpark(self, request_id: str, bounds: QueueBounds = NO_BOUNDS, limits: bytes = b"") -> UnparkReply:
        """Queue a parked request again.

        limits: those of the caller's accounts (`packed_limits`), which must allow the rest; without any the rest is
        reserved in any case.
        Raises QueueFull and LimitReached.
        """
        args: list[Any] = [self.keys.prefix, request_id, bounds.requests, bounds.tokens, limits]
        reply = await self._unpark(keys=[self.keys.request(request_id)], args=[*args, RETENTION_S])
        found = UnparkReply(text(reply[0]))
        check_refusal(reply)
        return found

    async def parked_until(self, request_id: str) -> float | None:
        """Return the unix time at which a parked request ends; None if it is not parked."""
        until_ms = await self.client.zscore(self.keys.parked, request_id)
        return None if until_ms is None else until_ms / 1000

    async def parked_ids(self) -> list[str]:
        """Return all parked requests, first those that end soonest."""
        return list(map(text, await self.client.zrange(self.keys.parked, 0, -1)))

    async def lapsed(self, count: int = 100) -> list[str]:
        """Return parked requests whose time is over; `expire` ends each."""
        seconds, micros = await self.client.time()
        found = await self.client.zrangebyscore(
            self.keys.parked, "-inf", f"({1000 * seconds + micros // 1000}", start=0, num=count
        )
        return list(map(text, found))

    async def read_parked(self, count: int) -> list[ParkedRequest]:
        """Return parked requests, first those that end soonest."""
        seconds, micros = await self.client.time()
        members: Any = await self.client.zrange(self.keys.parked, 0, count - 1, withscores=True)
        pipe = self.client.pipeline(transaction=False)
        for name, _ in members:
            pipe.hmget(self.keys.request(text(name)), "emitted", "class", "metadata")
        found = []
        for (name, until_ms), (emitted, priority_class, metadata) in zip(members, await pipe.execute(), strict=True):
            left_s = until_ms / 1000 - seconds - micros / 1e6
            emitted_tokens = int(emitted) if emitted and emitted.isdigit() else 0
            found.append(
                ParkedRequest(text(name), left_s, emitted_tokens, text(priority_class or b""), metadata or b"")
            )
        return found

    async def unended(self, worker_id: str = "") -> list[str]:
        """Return the requests that wait or run; with a worker, those that it runs."""
        found: list[str] = []
        for name in (*QUEUES, *WAITING_QUEUES):
            entries: Any = await self.client.xrange(self.keys.queue(name))
            found += [text(fields[b"id"]) for _, fields in entries if b"id" in fields]
        if not worker_id:
            return found
        pipe = self.client.pipeline(transaction=False)
        for request_id in found:
            pipe.hget(self.keys.request(request_id), "owner")
        owners = await pipe.execute() if found else []
        return [request_id for request_id, owner in zip(found, owners, strict=True) if text(owner or b"") == worker_id]
