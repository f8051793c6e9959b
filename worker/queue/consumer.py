"""Claims requests from the queue: as many as the engine has free rows for. All other requests wait in Redis.

A request with several sequences takes several rows. If the next request has more rows than are free it waits in Redis,
where another worker may have them, and this worker reads no later request. After WIDE_S the worker takes it in any
case: the engine then keeps rows that become free for it, and other workers run the later requests.

A blocking read is never cancelled, because an entry that it was about to return would be delivered without being seen;
the read ends by itself within BLOCK_S. For the same reason a failed read is followed by one of the pending entries.

Higher priority classes are read first, and a full engine still takes requests that may displace those of lower classes.
To prevent starvation every fourth read takes one standard request first and every eighth read one batch request; these
run as if they were of the highest class.

Requests whose leases another worker has not renewed in time are claimed by this worker. A request during which workers
have died twice may be a poison message: it is isolated, which means that it runs alone until its first token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from redis.exceptions import RedisError, ResponseError

from quire.shared.process.backoff import Backoff
from quire.shared.protocol.broker import Broker, Claim, QueueReader, StepCommit, StreamEntry, new_id
from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.messages import GenerationRequest, MessageError, Outcome, StepItem
from quire.shared.protocol.sampling_params import MAX_CHOICES
from quire.shared.protocol.states import OutcomeName
from quire.shared.redis.clients import BLOCK_S
from quire.worker.queue.attempt_spans import spans_of
from quire.worker.queue.committer import Committer
from quire.worker.queue.counts import ClaimCounts
from quire.worker.queue.estimates import Started
from quire.worker.queue.executor import Executor

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

log = logging.getLogger(__name__)

# Interval at which a full engine is asked for free rows.
FULL_S = 0.01
# The interval while requests of higher classes may displace others: a read waits for such requests meanwhile.
DISPLACE_S = 0.05
# Time for which a worker leaves a request with more rows than it has free to others.
WIDE_S = 0.05
RETRY_S = (0.2, 2.0)
# Intervals, in reads, at which one request of a lower class comes first.
TURNS = ((8, "batch"), (4, "standard"))


class LoadedAdapters(Protocol):
    """The LoRA adapters of this worker (`AdapterLoader`)."""

    def holds(self, name: str, digest: str) -> bool: ...

    async def refresh(self) -> None: ...


class Consumer:
    """Claims stream entries and starts their requests in the engine. `incarnation` names this process."""

    def __init__(
        self,
        broker: Broker,
        reader: QueueReader,
        committer: Committer,
        engine: Executor,
        incarnation: str,
        lease_s: float,
        tracer: Tracer | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._broker = broker
        self._reader = reader
        self._committer = committer
        self._engine = engine
        self._incarnation = incarnation
        self.claims = ClaimCounts()
        self._lease_s = lease_s
        self._tracer = tracer
        self._adapters = adapters
        self._loading: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._reads_pending = True
        self._reads = 0
        # The next request, while it has more rows than are free; and the time since when.
        self._wide, self._wide_since = "", 0.0
        # Requests that must run alone, with their logs. The first of them runs now if `_runs_isolated`.
        self._isolated: deque[tuple[Claim, GenerationRequest, tuple[StepItem, ...]]] = deque()
        self._runs_isolated = False
        # Earliest time at which leases of other workers are taken over.
        self._reclaims_at = 0.0

    def reread_pending(self) -> None:
        """Read this worker's pending entries next: a lost request may be among them and can be claimed again."""
        self._reads_pending = True

    def stop(self) -> None:
        """Stop reading. A read in progress ends within BLOCK_S; its entries stay pending until their leases end."""
        self._stopping.set()

    @property
    def waiting_isolated(self) -> list[tuple[str, str]]:
        """Isolated requests that have not started, each with its attempt token. After `stop` they never start here."""
        claims = [claim for claim, _, _ in self._isolated][self._runs_isolated :]
        return [(claim.request_id, claim.attempt) for claim in claims if self._committer.lacks_progress(claim)]

    def postpone_reclaim(self) -> None:
        """Take over no leases for the time of one lease: while Redis was away no worker could renew its own."""
        self._reclaims_at = asyncio.get_running_loop().time() + self._lease_s

    async def run(self) -> None:
        """Read until `stop`."""
        backoff = Backoff(*RETRY_S)
        while not self._stopping.is_set():
            try:
                if self._reads_pending:
                    self._reads_pending = False
                    await self._broker.create_groups()
                    await self._take(await self._reader.pending())
                if self._isolated:
                    await self._run_isolated()
                    await asyncio.sleep(FULL_S)
                    continue
                free_rows = self._engine.free_rows
                if free_rows <= 0 or not await self._take_new(free_rows):
                    await self._take_displacing()
                    continue
                backoff.reset()
            except (RedisError, OSError) as error:
                delay = backoff.next()
                if isinstance(error, ResponseError) and "NOGROUP" not in str(error):
                    log.error("Redis refuses to read the queue: %s", error)
                else:
                    log.warning("reading the queue failed (%s); retrying in %.1f s", error, delay)
                self._reads_pending = True
                self.postpone_reclaim()
                await asyncio.sleep(delay)

    async def run_reclaim(self) -> None:
        """Claim requests whose leases other workers have not renewed, until `stop`."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 10):
                    await self._stopping.wait()
                    return
            free_rows = self._engine.free_rows
            if free_rows <= 0 or self._isolated or loop.time() < self._reclaims_at:
                continue
            try:
                lease_ms = int(1000 * self._lease_s)
                entries = await self._broker.reclaim(self._reader.worker_id, lease_ms, free_rows)
                others = [entry for entry in entries if not self._committer.runs(entry.request_id)]
                if others:
                    log.warning(
                        "claiming %d requests whose workers have not renewed their leases for %g s",
                        len(others),
                        self._lease_s,
                    )
                    await self._take(others)
            except (RedisError, OSError) as error:
                if not (isinstance(error, ResponseError) and "NOGROUP" in str(error)):
                    log.warning("claiming requests of other workers failed: %s", error)
                self.postpone_reclaim()
                self._reads_pending = True

    async def _take_new(self, free_rows: int) -> bool:
        """Take requests for the free rows, first one of a lower class if it is the turn of that class.

        Returns False if the next request has more rows, and is left to other workers for now.
        """
        is_late = bool(self._wide) and asyncio.get_running_loop().time() - self._wide_since >= WIDE_S
        turn = next((name for every, name in TURNS if (self._reads + 1) % every == 0), None)
        if turn is not None:
            entries = await self._reader.read(1, 0, (turn,), MAX_CHOICES if is_late else free_rows)
            await self._take(entries, priority=0)
            # An empty class says nothing about the request that the last read of all classes has left.
            if self._reader.too_wide and self._leaves_next():
                return False  # the turn of the class is not over
            free_rows -= sum(entry.rows for entry in entries)
        self._reads += 1
        if free_rows <= 0:
            return True
        widest = MAX_CHOICES if is_late else free_rows
        await self._take(await self._reader.read(free_rows, int(1000 * BLOCK_S), widest=widest))
        return not self._leaves_next()

    def _leaves_next(self) -> bool:
        """Note whether the last read has left the next request because of its rows, and since when."""
        if self._reader.too_wide != self._wide:
            self._wide, self._wide_since = self._reader.too_wide, asyncio.get_running_loop().time()
        return bool(self._wide)

    async def _take_displacing(self) -> None:
        """Take one request that can start by displacing those of lower classes; wait if there is none."""
        free_rows = max(0, self._engine.free_rows)
        displaceable = dict(zip(PRIORITY_CLASSES, self._engine.displaceable, strict=False))
        classes = [name for name, rows in displaceable.items() if rows > 0]
        if not classes:
            await asyncio.sleep(FULL_S)
            return
        for name in classes:
            entries = await self._reader.read(1, 0, (name,), free_rows + displaceable[name])
            if entries:
                await self._take(entries)
                return
        await self._take(await self._reader.wait(classes, int(1000 * DISPLACE_S)))

    async def _take(self, entries: list[StreamEntry], priority: int | None = None) -> None:
        """Claim the requests of these entries and start them. priority: replaces the priority of their class."""
        for entry in entries:
            if self._stopping.is_set():
                return
            if self._committer.runs(entry.request_id):
                continue
            pace = self._engine.status.pace
            claim = await self._broker.claim(
                entry, self._reader.worker_id, new_id(), self._incarnation, self._committer.errors.corrected(pace)
            )
            if claim is None:
                continue
            self.claims.note(claim)
            spans = spans_of(self._tracer, claim, self._reader.worker_id) if self._tracer is not None else None
            try:
                request, logged = GenerationRequest.decode(claim.body), claim.items()
                if request.id != claim.request_id:
                    raise MessageError(f"its body belongs to request {request.id}")
            except MessageError as error:
                self._broker.note_corrupt("request", claim.request_id, error)
                item = StepItem(
                    claim.request_id, claim.emitted, (), Outcome(OutcomeName.ERROR, "the request cannot be read")
                )
                self._committer.register(claim, (), spans)
                self._committer.put([StepCommit(claim.attempt, item)])
                continue
            if request.sampling.grammar:
                await asyncio.to_thread(self._engine.prepare, request)
            is_plain = claim.deliveries == 1 and request.rows == 1
            started = Started(time.monotonic(), len(request.prompt), pace) if is_plain else None
            is_wanted = self._committer.register(claim, claim.logged, spans, started)
            if spans is not None:
                spans.set_prompt_tokens(len(request.prompt))
            if claim.runs_alone:
                log.warning(
                    "request %s is isolated: %d workers have died while they ran it",
                    claim.request_id,
                    claim.deaths,
                    extra={"request_id": claim.request_id},
                )
                self._isolated.append((claim, request, logged))
                continue
            loader = self._adapters if request.adapter and is_wanted else None
            if loader and not loader.holds(request.adapter, request.adapter_digest):
                # Requests for adapters that this worker holds start first.
                task = asyncio.create_task(self._start_with_adapter(loader, claim, request, logged, priority))
                self._loading.add(task)
                task.add_done_callback(self._loading.discard)
                continue
            await self._start(claim, request, logged, priority)
            if not is_wanted:
                self._engine.finish(request.id, OutcomeName.CANCELLED)

    async def _start_with_adapter(
        self,
        loader: LoadedAdapters,
        claim: Claim,
        request: GenerationRequest,
        logged: tuple[StepItem, ...],
        priority: int | None,
    ) -> None:
        """Start a request after its adapter has been loaded. If that fails, the engine refuses the request."""
        try:
            await loader.refresh()
        except (RedisError, OSError) as error:
            log.warning("the announced adapters cannot be read: %s", error)
        if (claim.request_id, claim.attempt) in self._committer.attempts:  # not lost or cancelled meanwhile
            await self._start(claim, request, logged, priority)

    async def _start(
        self, claim: Claim, request: GenerationRequest, logged: tuple[StepItem, ...], priority: int | None = None
    ) -> None:
        if priority is None:
            priority = PRIORITY_CLASSES.index(claim.priority_class)
        if not request.images:
            self._engine.add(request, claim.attempt, logged, priority)
        elif (pictures := await self._pictures(claim, request)) is not None:
            self._engine.add(request, claim.attempt, logged, priority, pictures)

    async def _pictures(self, claim: Claim, request: GenerationRequest) -> Mapping[str, bytes] | None:
        """Return the files of the images of a request, by digest; None if the attempt is over.

        The request ends if Redis has lost a file.
        """
        backoff = Backoff(*RETRY_S)
        while (claim.request_id, claim.attempt) in self._committer.attempts:
            try:
                files = await self._broker.images(request)
            except (RedisError, OSError):
                await asyncio.sleep(backoff.next())
                continue
            if files is not None:
                return files
            lost = Outcome(OutcomeName.ERROR, "an image of the request is not in Redis any more; send it again")
            self._committer.put([StepCommit(claim.attempt, StepItem(claim.request_id, claim.emitted, (), lost))])
            break
        return None

    async def _run_isolated(self) -> None:
        """Start the first isolated request once no other request lacks progress.

        The isolation of a request ends with its first token.
        """
        committer = self._committer
        waiting = deque(entry for entry in self._isolated if committer.lacks_progress(entry[0]))
        if len(waiting) < len(self._isolated):
            self._runs_isolated = self._runs_isolated and bool(waiting) and waiting[0] is self._isolated[0]
            self._isolated = waiting
        if waiting and not self._runs_isolated and committer.num_without_progress == len(waiting):
            # `begin` marks only this request: if it kills the worker, the worker's other requests count no death.
            claim = waiting[0][0]
            if not await self._broker.begin(claim):
                committer.lose([(claim.request_id, claim.attempt)], self._engine)
            elif committer.lacks_progress(claim):  # it may have been lost during `begin`
                self._runs_isolated = True
                await self._start(*waiting[0], priority=0)
