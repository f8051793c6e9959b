"""The verbs of a worker: claim requests, renew and release their leases, and publish views of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from quire.shared.protocol.broker.lane import Lane, create_group, text
from quire.shared.protocol.broker.reader import StreamEntry, read_entry
from quire.shared.protocol.keys import BATCH_CLASS, GROUP, QUEUES, RETENTION_S
from quire.shared.protocol.messages import GenerationRequest, MessageError, StepItem, decode_items, unpack
from quire.shared.protocol.pace import UNKNOWN_PACE, Pace
from quire.shared.protocol.states import ClaimReply, DropReason

# Bound of the field `gateways`, the gateways that listen to a request.
MAX_LISTENERS_BYTES = 65_536
# A request is quarantined with this death of a worker that ran it; progress resets the count. From one death earlier it
# runs alone, so that it cannot take other requests with it.
MAX_DEATHS = 3
ALONE_FROM_DEATHS = MAX_DEATHS - 1


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that this worker owns. The attempt token fences it; `logged` has the items of earlier attempts.

    deaths: workers that died with it since its last progress. deliveries: attempts so far, including this claim.
    traceparent: of the gateway's span, '' without tracing. before: token of the previous attempt, '' for the first.
    is_background: the request runs on without a client. placement: how the request came here if a worker held a prefix
    of it: it was left to this worker ('holder'), to another one that did not take it in time ('waited'), or to nobody,
    since the holder was busy ('busy'); '' if none held a prefix. holder: that worker.
    """

    request_id: str
    attempt: str
    gateway: str
    priority_class: str
    body: bytes
    emitted: int
    waited_ms: int
    deaths: int
    logged: tuple[bytes, ...]
    deliveries: int = 1
    traceparent: str = ""
    before: str = ""
    is_background: bool = False
    placement: str = ""
    holder: str = ""

    @property
    def is_unwatched(self) -> bool:
        """True if no client reads the output as it is made: a line of a batch, or a background call of its class."""
        return self.is_background and self.priority_class == BATCH_CLASS

    @property
    def runs_alone(self) -> bool:
        """True if the request must wait until nothing else runs, and for `begin`."""
        return self.deaths >= ALONE_FROM_DEATHS

    def items(self) -> tuple[StepItem, ...]:
        """Decode the items of the output log. Raise MessageError."""
        return tuple(item for data in self.logged for item in decode_items(data))


class WorkerVerbs(Lane):
    """The verbs of a worker, except `commit_step`."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._claim = self.script("claim")
        self._begin = self.script("begin")
        self._renew = self.script("renew")
        self._release = self.script("release")
        # Requests that were dropped because they could not end before their deadlines.
        self.hopeless = 0

    async def create_groups(self) -> None:
        """Create the missing queues and their consumer group."""
        for stream in (*map(self.keys.queue, QUEUES), self.keys.wake):
            await create_group(self.client, stream)

    async def claim(
        self, delivery: StreamEntry, worker_id: str, attempt: str, incarnation: str = "", pace: Pace = UNKNOWN_PACE
    ) -> Claim | None:
        """Claim a delivered request for the attempt `attempt` (`new_id()`).

        Return None if nothing is left to do, or if another worker has taken the request over since.
        incarnation: name of this process, by default the worker's. A request that another incarnation owned has seen a
        death. pace: of this worker, by which a request is dropped that would end after its deadline.
        """
        request_id = delivery.request_id
        keys = [self.keys.request(request_id), self.keys.output(request_id)]
        args: list[Any] = [
            self.keys.prefix,
            request_id,
            delivery.queue,
            delivery.entry_id,
            worker_id,
            incarnation or worker_id,
        ]
        args += [attempt, RETENTION_S, MAX_DEATHS, pace.prompt_us, pace.token_us]
        reply = await self._claim(keys=keys, args=args)
        if text(reply[0]) != ClaimReply.CLAIMED:
            reason = text(reply[1]) if len(reply) > 1 else ""
            if reason == DropReason.UNKNOWN:
                self.note_corrupt("queue entry", delivery.entry_id, f"there is no request {request_id[:64]!r}")
            elif reason == DropReason.HOPELESS:
                self.hopeless += 1
            elif reason == DropReason.CORRUPT:
                self.note_corrupt("request", request_id, "its hash or its log; it ended as an error")
            return None
        _, body, gateway, priority_class, emitted, waited_ms, deaths, deliveries, logged, *others = reply
        traceparent, before, background, *affinity = others
        return Claim(
            request_id,
            attempt,
            text(gateway),
            text(priority_class),
            body,
            int(emitted),
            int(waited_ms),
            int(deaths),
            tuple(logged),
            int(deliveries),
            text(traceparent),
            text(before),
            bool(background),
            *map(text, affinity),
        )

    async def images(self, request: GenerationRequest) -> dict[str, bytes] | None:
        """Return the files of the images of a request, by digest; None if one is not in Redis any more."""
        if not request.images:
            return {}
        files: Any = await self.client.mget([self.keys.image(name) for name in request.image_names])
        return None if None in files else dict(zip(request.digests, files, strict=True))

    async def begin(self, claim: Claim) -> bool:
        """Start a claim that `runs_alone`: from now on a death of this worker counts.

        Return False if the attempt is over, for example because the request was cancelled or its deadline passed.
        """
        args = [self.keys.prefix, claim.request_id, claim.attempt, RETENTION_S]
        return bool(await self._begin(keys=[self.keys.request(claim.request_id)], args=args))

    async def renew(self, worker_id: str, attempts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Renew the leases of running requests, (id, attempt) each. Return those that another attempt owns."""
        args = [self.keys.prefix, worker_id, *(part for attempt in attempts for part in attempt)]
        lost = [text(part) for part in await self._renew(keys=[self.keys.load], args=args)] if attempts else []
        return list(zip(lost[::2], lost[1::2], strict=True))

    async def release(self, attempts: Sequence[tuple[str, str]]) -> int:
        """Return running requests, (id, attempt) each, to the queue for another worker. Return their number."""
        args = [self.keys.prefix, *(part for attempt in attempts for part in attempt)]
        return int(await self._release(keys=[self.keys.load], args=args)) if attempts else 0

    async def reclaim(self, worker_id: str, lease_ms: int, rows: int) -> list[StreamEntry]:
        """Take over requests that their workers have not renewed for `lease_ms`, as many as fill `rows` rows.

        The last request may have more rows than are left.
        """
        reclaimed: list[StreamEntry] = []
        for name in QUEUES:
            if rows <= 0:
                break
            stream = self.keys.queue(name)
            old: Any = await self.client.xpending_range(stream, GROUP, "-", "+", rows, idle=lease_ms)
            for pending in old:
                if rows <= 0:
                    break
                # Nothing, if another worker was faster.
                reply: Any = await self.client.xclaim(stream, GROUP, worker_id, lease_ms, [pending["message_id"]])
                taken = [read_entry(name, entry_id, fields) for entry_id, fields in reply if entry_id is not None]
                rows -= sum(entry.rows for entry in taken)
                reclaimed += taken
        return reclaimed

    async def listeners_of(self, request_ids: Sequence[str]) -> dict[str, list[str]]:
        """Return the gateways that listen to each of these requests; some may have died.

        Background requests, which need no listener, and unknown requests are left out.
        """
        pipe = self.client.pipeline(transaction=False)
        for request_id in request_ids:
            pipe.hmget(self.keys.request(request_id), "gateways", "background")
        replies = await pipe.execute() if request_ids else []
        return {
            request_id: _listeners(gateways)
            for request_id, (gateways, background) in zip(request_ids, replies, strict=True)
            if gateways is not None and not background
        }

    async def live_gateways(self, gateway_ids: Sequence[str]) -> set[str]:
        """Return the gateways among these that hold their lease."""
        pipe = self.client.pipeline(transaction=False)
        for gateway_id in gateway_ids:
            pipe.exists(self.keys.gateway_lease(gateway_id))
        replies = await pipe.execute() if gateway_ids else []
        return {gateway_id for gateway_id, lives in zip(gateway_ids, replies, strict=True) if lives}

    async def is_looked_at(self, worker_id: str) -> bool:
        """Return whether a gateway has asked for views of this worker's engine."""
        return bool(await self.client.exists(self.keys.view(worker_id)))

    async def publish_view(self, worker_id: str, view: bytes) -> None:
        """Publish a view to every gateway that shows this worker."""
        await self.client.publish(self.keys.view(worker_id), view)


def _listeners(data: bytes) -> list[str]:
    try:
        names = unpack(data, MAX_LISTENERS_BYTES)
    except MessageError:
        return []  # counts as no listener; a gateway that listens attaches again
    return [name for name in names if type(name) is str] if type(names) is list else []
