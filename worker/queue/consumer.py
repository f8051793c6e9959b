"""Pulls requests off the queue: as many as fit the engine now, never more. What waits, waits in Redis.

A blocking read is never cancelled, since the entry that it was about to return would be delivered and not seen; it
ends by itself within BLOCK_S. After a failed read the worker looks at its own pending entries once, for the same
reason.

Higher classes are read first, and a full engine still takes what may displace lower ones. So that nobody starves, every
fourth read takes one standard request first and every eighth one of batch, and these count as of the highest class.

What another worker has not renewed in time is taken over. A request with which workers have died twice runs alone until
its first token.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from redis.exceptions import RedisError, ResponseError

from quire.shared.broker import Broker, Claim, QueueReader, StepCommit, StreamEntry, new_id
from quire.shared.keys import PRIORITY_CLASSES
from quire.shared.messages import GenerationRequest, MessageError, Outcome, StepItem
from quire.shared.redis.clients import BLOCK_S
from quire.worker.inspect.tracing import spans_of
from quire.worker.queue.claim_counts import ClaimCounts
from quire.worker.queue.committer import Committer
from quire.worker.queue.engine_thread import EngineThread

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

log = logging.getLogger(__name__)

# How soon a full engine is asked again for room, and how soon higher classes are looked at that may displace others.
FULL_S = 0.01
DISPLACE_S = 0.05
RETRY_S = 0.2
RETRY_LIMIT_S = 2.0
# Every so many reads a lower class comes first, with one request.
TURNS = ((8, "batch"), (4, "standard"))


class Consumer:
    """Claims deliveries and hands them to the engine. `incarnation` names this process."""

    def __init__(
        self,
        broker: Broker,
        reader: QueueReader,
        committer: Committer,
        engine: EngineThread,
        incarnation: str,
        lease_s: float,
        tracer: Tracer | None = None,
    ) -> None:
        self._broker = broker
        self._reader = reader
        self._committer = committer
        self._engine = engine
        self._incarnation = incarnation
        self.claims = ClaimCounts()
        self._lease_s = lease_s
        self._tracer = tracer
        self._stopping = asyncio.Event()
        self._look_back = True
        self._reads = 0
        # Requests that must run alone, with their logs; the first of them runs if `_is_alone`.
        self._suspects: deque[tuple[Claim, GenerationRequest, tuple[StepItem, ...]]] = deque()
        self._is_alone = False
        # Not before a lease after Redis was away: nobody could renew, and that is no sign of death.
        self._reclaims_at = 0.0

    def look_back(self) -> None:
        """Look at what is pending for this worker with the next read: something of it may be there to take again."""
        self._look_back = True

    def stop(self) -> None:
        """Read no more. A read in progress ends within BLOCK_S; what it brings stays pending until its lease ends."""
        self._stopping.set()

    @property
    def held_back(self) -> list[tuple[str, str]]:
        """Requests that wait here to run alone, each with its attempt token: once stopped, they never will."""
        claims = [claim for claim, _, _ in self._suspects][self._is_alone :]
        return [(claim.request_id, claim.attempt) for claim in claims if self._committer.is_unproven(claim)]

    def redis_was_away(self) -> None:
        """Give every worker a lease's time to renew before anything is taken from it."""
        self._reclaims_at = asyncio.get_running_loop().time() + self._lease_s

    async def run(self) -> None:
        """Read until `stop`."""
        delay = RETRY_S
        while not self._stopping.is_set():
            try:
                if self._look_back:
                    self._look_back = False
                    await self._broker.create_groups()
                    await self._take(await self._reader.pending())
                if self._suspects:
                    await self._run_suspects()
                    await asyncio.sleep(FULL_S)
                    continue
                room = self._engine.room
                if room <= 0:
                    await self._displace()
                    continue
                if await self._take_turn():
                    room -= 1
                if room > 0:
                    await self._take(await self._reader.read(room, int(1000 * BLOCK_S)))
                delay = RETRY_S
            except (RedisError, OSError) as error:
                if isinstance(error, ResponseError) and "NOGROUP" not in str(error):
                    log.error("Redis refuses to serve the queue: %s", error)
                else:
                    log.warning("reading the queue failed (%s); again in %.1f s", error, delay)
                self._look_back = True
                self.redis_was_away()
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_LIMIT_S)

    async def run_reclaim(self) -> None:
        """Take over what other workers have not renewed, until `stop`."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 10):
                    await self._stopping.wait()
                    return
            room = self._engine.room
            if room <= 0 or self._suspects or loop.time() < self._reclaims_at:
                continue
            try:
                lease_ms = int(1000 * self._lease_s)
                found = await self._broker.reclaim(self._reader.worker_id, lease_ms, room)
                others = [delivery for delivery in found if not self._committer.runs(delivery.request_id)]
                if others:
                    log.warning(
                        "taking over %d requests whose workers were silent for %g s", len(others), self._lease_s
                    )
                    await self._take(others)
            except (RedisError, OSError) as error:
                if not (isinstance(error, ResponseError) and "NOGROUP" in str(error)):
                    log.warning("taking over requests failed: %s", error)
                self.redis_was_away()
                self._look_back = True

    async def _take_turn(self) -> bool:
        """One request of a lower class, if it is its turn and there is one."""
        self._reads += 1
        for every, name in TURNS:
            if self._reads % every == 0:
                found = await self._reader.read(1, 0, (name,))
                await self._take(found, priority=0)
                return bool(found)
        return False

    async def _displace(self) -> None:
        """Take requests for which a full engine has room by displacing lower classes."""
        for priority, room in enumerate(self._engine.displaceable):
            if room > 0:
                found = await self._reader.read(1, 0, (PRIORITY_CLASSES[priority],))
                if found:
                    await self._take(found)
                    return
        await asyncio.sleep(DISPLACE_S if any(self._engine.displaceable) else FULL_S)

    async def _take(self, deliveries: list[StreamEntry], priority: int | None = None) -> None:
        for delivery in deliveries:
            if self._stopping.is_set():
                return
            if self._committer.runs(delivery.request_id):
                continue
            claim = await self._broker.claim(delivery, self._reader.worker_id, new_id(), self._incarnation)
            if claim is None:
                continue
            self.claims.note(claim)
            spans = spans_of(self._tracer, claim, self._reader.worker_id) if self._tracer is not None else None
            try:
                request, logged = GenerationRequest.decode(claim.body), claim.items()
                if request.id != claim.request_id:
                    raise MessageError(f"its body is that of request {request.id}")
            except MessageError as error:
                self._broker.note_corrupt("request", claim.request_id, error)
                item = StepItem(claim.request_id, claim.emitted, (), Outcome("error", "the request cannot be read"))
                self._committer.register(claim, (), spans)
                self._committer.put([StepCommit(claim.attempt, item)])
                continue
            if request.sampling.json_schema:
                await asyncio.to_thread(self._engine.prepare, request)
            wanted = self._committer.register(claim, claim.logged, spans)
            if spans is not None:
                spans.asks(len(request.prompt))
            if claim.runs_alone:
                log.warning(
                    "request %s has seen %d workers die: it runs alone",
                    claim.request_id,
                    claim.deaths,
                    extra={"request_id": claim.request_id},
                )
                self._suspects.append((claim, request, logged))
                continue
            self._start(claim, request, logged, priority)
            if not wanted:
                self._engine.finish(request.id, "cancelled")

    def _start(
        self,
        claim: Claim,
        request: GenerationRequest,
        logged: tuple[StepItem, ...],
        priority: int | None = None,
    ) -> None:
        if priority is None:
            priority = PRIORITY_CLASSES.index(claim.priority_class)
        self._engine.add(request, claim.attempt, logged, priority)

    async def _run_suspects(self) -> None:
        """Start the first of those that must run alone once nothing else is unproven; its progress clears it."""
        committer = self._committer
        waiting = deque(suspect for suspect in self._suspects if committer.is_unproven(suspect[0]))
        if len(waiting) < len(self._suspects):
            self._is_alone = self._is_alone and bool(waiting) and waiting[0] is self._suspects[0]
            self._suspects = waiting
        if waiting and not self._is_alone and committer.num_unproven == len(waiting):
            # Those behind it have nothing to do with it if it kills again.
            claim = waiting[0][0]
            if not await self._broker.begin(claim):
                committer.lose([(claim.request_id, claim.attempt)], self._engine)
            elif committer.is_unproven(claim):  # it may have been lost meanwhile
                self._is_alone = True
                self._start(*waiting[0], priority=0)
