"""The queue between gateway and worker: one method per verb of the protocol, each a script or one command.

Every script is repeatable: when a call fails its effect is unknown, and the caller may make the same call again.
docs/protocol.md states the invariants that the scripts keep.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import msgpack
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.keys import DEFAULT_CLASS, GROUP, PRIORITY_CLASSES, QUEUES, LaneKeys
from shared.messages import MessageError, StepItem, WorkerCard, decode_items, unpack

log = logging.getLogger(__name__)

# How long the hash and the output log of a finished request stay: a client may come back for what it missed.
RETENTION_S = 600
# A worker that has not beaten for so long is not counted as making progress.
WORKER_TTL_S = 5
GATEWAY_TTL_S = 10
BEAT_S = 1.0
# How long a gateway's wish to see a worker's engine holds.
VIEW_TTL_S = 3.0


# How long an idempotency key is remembered, at most: no longer than its request is.
IDEMPOTENCY_S = 86_400
# A notice in a worker's mailbox; every other one is the token of an attempt that is over.
CANCEL = "cancel"
_ATTEMPT = re.compile(r"[\w-]{1,64}", re.ASCII)
# Bound of the field with the gateways at which somebody listens to a request.
MAX_LISTENERS_BYTES = 65_536
# A request is given up with this death of a worker that ran it, counted anew when it made progress.
MAX_DEATHS = 3


class IdempotencyConflict(Exception):
    """The idempotency key stands for a call with another body."""


class QueueFull(Exception):
    """The queue is at its bound. Carries what waits now, for Retry-After."""

    def __init__(self, requests: int, tokens: int) -> None:
        super().__init__(f"{requests} requests with {tokens} tokens are waiting")
        self.requests = requests
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What may wait in a lane, over all its classes."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A stream entry that this consumer was handed and has yet to claim. `queue` is one of QUEUES."""

    queue: str
    entry_id: str
    request_id: str
    cost: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A request in this worker's hands: the attempt token fences it, `logged` is what earlier attempts emitted.

    deaths: workers that died with it since it last made progress. deliveries: attempts so far, with this one.
    traceparent: of the gateway's span, '' without tracing. before: the attempt token before this one, '' for the first.
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

    def items(self) -> tuple[StepItem, ...]:
        """The items of the output log. Raises MessageError."""
        return tuple(item for data in self.logged for item in decode_items(data))


@dataclass(frozen=True, slots=True)
class Attachment:
    """A request that a gateway has joined: whether it is done, and what the first gateway noted about the call."""

    is_done: bool
    about: bytes


@dataclass(frozen=True, slots=True)
class NameHolder:
    """The process that has a worker's name: which one, where it runs, how often it beats, its last beat (Redis ms)."""

    incarnation: str
    home: str
    beat_s: float
    beat_ms: int


@dataclass(frozen=True, slots=True)
class DeadRequest:
    """An entry of the dead stream."""

    entry_id: str
    request_id: str
    priority_class: str
    worker: str
    emitted: int
    body: bytes
    about: bytes


@dataclass(frozen=True, slots=True)
class StepReply:
    """What the commit of a step told the worker about its requests."""

    lost: tuple[tuple[str, str], ...]  # request id, and the attempt token that is over
    cancelled: tuple[str, ...]
    expired: tuple[str, ...]
    behind: dict[str, int]
    # Request id and notice: what of the above is in the worker's mailbox until the next commit says it was obeyed.
    notices: tuple[tuple[str, str], ...] = ()


class StepCommit(NamedTuple):
    """One request of a step: the item, and the attempt under which it was computed."""

    attempt: str
    item: StepItem


def new_id() -> str:
    """128 random bits, hexadecimal: request ids, attempt tokens and incarnations."""
    return secrets.token_hex(16)


class Broker:
    """The verbs of one lane over one command connection pool. Raises redis-py's RedisError when Redis fails."""

    def __init__(self, client: Redis, lane: str) -> None:
        self.client = client
        self.keys = LaneKeys(lane)
        # Without the types for bytes and short strings, which Redis' cmsgpack does not know.
        self._packer = msgpack.Packer(use_bin_type=False)
        # What was found in Redis that cannot be read and was dropped, or ended its request: by what it is.
        self.corrupt: Counter[str] = Counter()
        folder = files("shared") / "scripts"
        prelude = (folder / "_prelude.lua").read_text()

        def script(name: str) -> Any:
            return client.register_script(prelude + (folder / f"{name}.lua").read_text())

        self._submit = script("submit")
        self._claim = script("claim")
        self._commit_step = script("commit_step")
        self._cancel = script("cancel")
        self._renew = script("renew")
        self._release = script("release")
        self._attach = script("attach")
        self._detach = script("detach")
        self._expire = script("expire")
        self._beat = script("beat")
        self._retire = script("retire")

    def note_corrupt(self, what: str, name: str, why: object) -> None:
        """Count something that is corrupt; the first of each kind is logged."""
        self.corrupt[what] += 1
        if self.corrupt[what] == 1:
            log.error("%s %s is corrupt and was dropped (this is said once): %s", what, name, why)

    # --- gateway ------------------------------------------------------------------------------------------------------

    async def submit(
        self,
        request_id: str,
        body: bytes,
        *,
        gateway: str,
        cost: int,
        bounds: QueueBounds,
        priority_class: str = DEFAULT_CLASS,
        deadline_ms: int = 0,
        about: bytes = b"",
        is_background: bool = False,
        idempotency_key: str = "",
        fingerprint: str = "",
        traceparent: str = "",
    ) -> str:
        """Accept a request into the queue, once however often it is called.

        deadline_ms: from now, 0 for none. about: what `attach` returns. is_background: it runs on without a client.
        traceparent: of the span of the call, which `claim` returns.
        idempotency_key and fingerprint: a key that the client chose, and a hash of what it asked for.
        Returns the id of the request that stands for the call: another one if the key was used before. Raises QueueFull
        and IdempotencyConflict.
        """
        request = self.keys.request(request_id)
        keys = [request, self.keys.queue(priority_class)]
        keys.append(self.keys.idempotency(idempotency_key) if idempotency_key else request)
        args: list[Any] = [self.keys.prefix, request_id, body, gateway, priority_class]
        args += [cost, bounds.requests, bounds.tokens, deadline_ms, about, "1" if is_background else ""]
        args += [fingerprint if idempotency_key else "", IDEMPOTENCY_S, traceparent]
        reply = await self._submit(keys=keys, args=args)
        if reply[0] == b"full":
            raise QueueFull(int(reply[1]), int(reply[2]))
        if reply[0] == b"conflict":
            raise IdempotencyConflict(idempotency_key)
        return _text(reply[1]) if reply[0] == b"same" else request_id

    async def attach(self, request_id: str, gateway: str) -> Attachment | None:
        """Have the output of a request published to `gateway` from now on; None if it is unknown."""
        reply = await self._attach(keys=[self.keys.request(request_id)], args=[gateway])
        return Attachment(reply[0] == b"done", reply[1]) if reply else None

    async def detach(self, request_id: str, gateway: str) -> list[str]:
        """At `gateway` nobody listens to a request any more; returns where somebody does, or did when it died."""
        return list(map(_text, await self._detach(keys=[self.keys.request(request_id)], args=[gateway])))

    async def cancel(self, request_id: str, unless_beside: Sequence[str] | None = None) -> str:
        """Stop a request: 'cancelled' (it waited), 'flagged' (it runs), 'done' or 'unknown'.

        unless_beside: not ('wanted') if somebody listens at a gateway that is none of these.
        """
        args: list[Any] = [self.keys.prefix, request_id, RETENTION_S, "" if unless_beside is None else "1"]
        return _text(await self._cancel(keys=[self.keys.request(request_id)], args=[*args, *(unless_beside or ())]))

    async def expire(self, request_id: str) -> str:
        """End a request whose deadline has passed, waiting or running: 'expired', 'early', 'done' or 'unknown'."""
        keys = [self.keys.request(request_id)]
        return _text(await self._expire(keys=keys, args=[self.keys.prefix, request_id, RETENTION_S]))

    async def read_output(self, request_id: str, after: int = 0, count: int | None = None) -> list[StepItem]:
        """The items of the output log that end after token `after`, the terminal one included: at most `count` entries.

        With `count` one of them may be the entry that ends at `after`, which is then not among the items.
        """
        # The terminal item may have no tokens: its entry is `<tokens>-1`, so the range starts at `after` itself.
        entries: Any = await self.client.xrange(self.keys.output(request_id), min=f"{after}-0", count=count)
        items = [item for _, fields in entries for item in decode_items(fields[b"item"])]
        return [item for item in items if item.end > after or item.outcome is not None]

    async def refresh_gateway(self, gateway_id: str) -> None:
        """Renew the gateway's lease."""
        await self.client.set(self.keys.gateway_lease(gateway_id), "1", ex=GATEWAY_TTL_S)

    async def read_totals(self) -> dict[str, int]:
        """How many requests of this lane were accepted, and ended, by outcome, since Redis was empty."""
        totals: Any = await self.client.hgetall(self.keys.totals)
        return {_text(name): int(count) for name, count in totals.items()}

    async def read_recoveries(self) -> dict[str, int]:
        """What recovery did in this lane since Redis was empty: migrations, fenced, repairs and corrupt.

        migrations: claims of requests that an earlier attempt had begun. fenced: items of attempts that were over.
        repairs: see `note_repairs`. corrupt: requests that ended as errors since what Redis had of them was corrupt.
        """
        counts: Any = await self.client.hgetall(self.keys.recoveries)
        return {_text(name): int(count) for name, count in counts.items()}

    async def note_repairs(self, count: int) -> None:
        """Count that gateways found in output logs what was published and did not arrive."""
        await self.client.hincrby(self.keys.recoveries, "repairs", count)

    async def read_dead(self, count: int = 100) -> list[DeadRequest]:
        """The newest entries of the dead stream; those that are corrupt are left out."""
        entries: Any = await self.client.xrevrange(self.keys.dead, count=count)
        found = []
        for entry_id, fields in entries:
            try:
                found.append(_dead_request(entry_id, fields))
            except (KeyError, ValueError) as error:
                self.note_corrupt("dead entry", _text(entry_id), repr(error))
        return found

    async def drop_dead(self, entry_id: str) -> bool:
        """Remove an entry of the dead stream; False if there is none."""
        return bool(await self.client.xdel(self.keys.dead, entry_id))

    async def live_workers(self) -> list[WorkerCard]:
        """The cards of the workers of this lane whose engine has made progress within WORKER_TTL_S."""
        names = await self.client.zrange(self.keys.workers, 0, -1)
        if not names:
            return []
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hget(self.keys.worker(_text(name)), "card")
        cards = []
        for name, data in zip(names, await pipe.execute(), strict=True):
            if data is not None:
                try:
                    cards.append(WorkerCard.decode(data))
                except MessageError as error:
                    # A worker of another version is not one that this gateway can use.
                    self.note_corrupt("worker card", _text(name), error)
        return cards

    async def look(self, worker_id: str) -> dict[str, int]:
        """Ask a worker to publish views of its engine for the next VIEW_TTL_S. Returns what waits in each queue."""
        pipe = self.client.pipeline(transaction=False)
        pipe.set(self.keys.view(worker_id), "1", px=int(1000 * VIEW_TTL_S))
        pipe.hmget(self.keys.load, *(f"requests:{name}" for name in QUEUES))
        _, waiting = await pipe.execute()
        return {name: max(0, int(count or 0)) for name, count in zip(QUEUES, waiting, strict=True)}

    async def queued(self) -> tuple[int, int]:
        """Requests and tokens that wait in this lane now."""
        requests, tokens = await self.client.hmget(self.keys.load, "requests", "tokens")
        return int(requests or 0), int(tokens or 0)

    # --- worker -------------------------------------------------------------------------------------------------------

    async def create_groups(self) -> None:
        """Make the queues and their consumer group where they are missing."""
        for name in QUEUES:
            try:
                await self.client.xgroup_create(self.keys.queue(name), GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def claim(self, delivery: Delivery, worker_id: str, attempt: str, incarnation: str = "") -> Claim | None:
        """Take a delivered request for the attempt `attempt` (`new_id()`); None if there is nothing left to do.

        Nothing is also what another worker has taken over since it was delivered here.

        incarnation: names this process, by default as its worker; a request that another one had has seen a death.
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
        reply = await self._claim(keys=keys, args=[*args, attempt, RETENTION_S, MAX_DEATHS])
        if reply[0] != b"claimed":
            if reply[1:] == [b"unknown"]:
                self.note_corrupt("queue entry", delivery.entry_id, f"there is no request {request_id[:64]!r}")
            elif reply[1:] == [b"corrupt"]:
                self.note_corrupt("request", request_id, "its hash or its log; it ended as an error")
            return None
        _, body, gateway, priority_class, emitted, waited_ms, deaths, deliveries, logged, traceparent, before = reply
        return Claim(
            request_id,
            attempt,
            _text(gateway),
            _text(priority_class),
            body,
            int(emitted),
            int(waited_ms),
            int(deaths),
            tuple(logged),
            int(deliveries),
            _text(traceparent),
            _text(before),
        )

    async def renew(self, worker_id: str, attempts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Keep the leases of running requests, (id, attempt) each; returns those that are another's by now."""
        args = [self.keys.prefix, worker_id, *(part for attempt in attempts for part in attempt)]
        lost = [_text(part) for part in await self._renew(keys=[self.keys.load], args=args)] if attempts else []
        return list(zip(lost[::2], lost[1::2], strict=True))

    async def release(self, attempts: Sequence[tuple[str, str]]) -> int:
        """Hand running requests back, (id, attempt) each, for another worker to go on with; returns how many."""
        args = [self.keys.prefix, *(part for attempt in attempts for part in attempt)]
        return int(await self._release(keys=[self.keys.load], args=args)) if attempts else 0

    async def reclaim(self, worker_id: str, lease_ms: int, count: int) -> list[Delivery]:
        """Take over up to `count` requests whose workers have not renewed them for `lease_ms`."""
        found: list[Delivery] = []
        for name in QUEUES:
            start: Any = "0-0"
            while len(found) < count:
                reply: Any = await self.client.xautoclaim(
                    self.keys.queue(name), GROUP, worker_id, lease_ms, start_id=start, count=count - len(found)
                )
                start, entries = reply[0], reply[1]
                found += [_delivery(name, entry_id, fields) for entry_id, fields in entries if entry_id is not None]
                if _text(start) == "0-0":
                    break
        return found

    async def listeners_of(self, request_ids: Sequence[str]) -> dict[str, list[str]]:
        """The gateways at which somebody listens to each of these requests, or did when they died.

        Requests in the background, which need no listener, and unknown ones are left out.
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
        """Those of these gateways that hold their lease."""
        pipe = self.client.pipeline(transaction=False)
        for gateway_id in gateway_ids:
            pipe.exists(self.keys.gateway_lease(gateway_id))
        replies = await pipe.execute() if gateway_ids else []
        return {gateway_id for gateway_id, lives in zip(gateway_ids, replies, strict=True) if lives}

    async def commit_step(
        self, worker_id: str, commits: Sequence[StepCommit], obeyed: Sequence[tuple[str, str]] = ()
    ) -> StepReply:
        """Log and publish one step's tokens under the fence. Repeat the identical call if it fails.

        obeyed: the `notices` of the reply before this one.
        """
        step: list[Any] = []
        for attempt, item in commits:
            outcome = item.outcome.name if item.outcome else ""
            step += (item.request_id, attempt, item.start, item.end, outcome, item.encode())
        # One argument for all: redis-py takes several microseconds for each.
        args: list[Any] = [self.keys.prefix, RETENTION_S, self._packer.pack(step)]
        args += (part.encode(errors="surrogateescape") for notice in obeyed for part in notice)
        reply: Any = await self._commit_step(keys=[self.keys.mailbox(worker_id)], args=args)
        lost, cancelled, expired, behind = (list(map(_text, part)) for part in reply[:4])
        noticed = _pairs([part.decode(errors="surrogateescape") for part in reply[4]])
        overtaken = []
        for request_id, notice in noticed:
            if notice == CANCEL:
                cancelled.append(request_id)
            elif _ATTEMPT.fullmatch(notice):
                overtaken.append((request_id, notice))
            elif (request_id, notice) not in obeyed:  # it comes again until a commit has taken it away
                self.note_corrupt("notice", repr(request_id[:64]), f"{notice[:64]!r}")
        return StepReply(
            (*_pairs(lost), *overtaken),
            tuple(cancelled),
            tuple(expired),
            {request_id: int(index) for request_id, index in _pairs(behind)},
            noticed,
        )

    async def is_looked_at(self, worker_id: str) -> bool:
        """Whether a gateway wants views of this worker's engine."""
        return bool(await self.client.exists(self.keys.view(worker_id)))

    async def publish_view(self, worker_id: str, view: bytes) -> None:
        """To every gateway where somebody looks."""
        await self.client.publish(self.keys.view(worker_id), view)

    async def holder(self, worker_id: str) -> NameHolder | None:
        """The process that lives under a worker's name, or has until lately; None if there is none."""
        fields = await self.client.hmget(self.keys.worker(worker_id), "incarnation", "home", "every", "beat")
        if any(field is None for field in fields):
            return None
        incarnation, home, beat_s, beat_ms = map(_text, fields)
        return NameHolder(incarnation, home, float(beat_s), int(beat_ms))

    async def enlist(self, worker_id: str, incarnation: str, home: str, beat_s: float, before: str = "") -> bool:
        """Take a worker's name, which is free or that of the dead incarnation `before`; False if another one has it.

        home: where this process runs, for whoever wants the name next. beat_s: how often `beat` will be called.
        """
        keys = [self.keys.worker(worker_id), self.keys.workers]
        ttl_s = max(WORKER_TTL_S, math.ceil(3 * beat_s))
        return bool(await self._beat(keys=keys, args=[worker_id, incarnation, home, beat_s, "", ttl_s, before]))

    async def beat(self, card: WorkerCard, slowest_step_s: float = 0.0, home: str = "", beat_s: float = BEAT_S) -> bool:
        """Publish the worker's card and its progress; False if another incarnation has the name by now.

        It counts as live for three of its slowest steps at least.
        """
        keys = [self.keys.worker(card.worker_id), self.keys.workers]
        ttl_s = max(WORKER_TTL_S, math.ceil(3 * max(beat_s, slowest_step_s)))
        args: list[Any] = [card.worker_id, card.incarnation, home, beat_s, card.encode(), ttl_s, ""]
        return bool(await self._beat(keys=keys, args=args))

    async def retire(self, worker_id: str, incarnation: str) -> None:
        """A worker that ends stops counting as live at once, and its name is free."""
        keys = [self.keys.worker(worker_id), self.keys.mailbox(worker_id), self.keys.workers]
        await self._retire(keys=keys, args=[worker_id, incarnation])


def _dead_request(entry_id: Any, fields: dict[bytes, bytes]) -> DeadRequest:
    """Raises KeyError and ValueError."""
    priority_class = fields[b"class"].decode()
    if priority_class not in PRIORITY_CLASSES:
        raise ValueError(f"class {priority_class[:64]!r}")
    return DeadRequest(
        _text(entry_id),
        fields[b"id"].decode(),
        priority_class,
        fields[b"worker"].decode(),
        int(fields[b"emitted"]),
        fields[b"body"],
        fields[b"about"],
    )


def _delivery(queue: str, entry_id: Any, fields: Any) -> Delivery:
    fields = fields or {}  # the entry was deleted while it was pending: claim removes it
    request_id, cost = _text(fields.get(b"id", b"")), fields.get(b"cost", b"0")
    return Delivery(queue, _text(entry_id), request_id, int(cost) if cost.isdigit() else 0)


class QueueReader:
    """Reads the queues of a lane for one worker over its own blocking connection. Never cancel `read`."""

    def __init__(self, client: Redis, lane: str, worker_id: str) -> None:
        self.client = client
        self.keys = LaneKeys(lane)
        self.worker_id = worker_id
        self._connection_id: int | None = None

    async def unblock(self, commands: Redis) -> None:
        """End a blocking `read` in progress at once, with nothing, over another connection."""
        if self._connection_id is not None:
            with suppress(RedisError, OSError):  # it then ends when its time is up
                await commands.client_unblock(self._connection_id)

    async def pending(self) -> list[Delivery]:
        """What this worker was handed before and has not finished: read at start and after any failed read."""
        self._connection_id = await self.client.client_id()
        return await self._read(QUEUES, start="0", count=None, block_ms=None)

    async def read(self, count: int, block_ms: int, queues: Sequence[str] = QUEUES) -> list[Delivery]:
        """Up to `count` new requests, of the first of `queues` first; waits up to `block_ms` if there are none.

        A read that waited can return one request of each queue.
        """
        found: list[Delivery] = []
        for name in queues:
            if len(found) < count:
                found += await self._read((name,), start=">", count=count - len(found), block_ms=None)
        if found or block_ms <= 0:
            return found
        return await self._read(queues, start=">", count=1, block_ms=block_ms)

    async def _read(
        self, queues: Sequence[str], *, start: str, count: int | None, block_ms: int | None
    ) -> list[Delivery]:
        streams: dict[Any, Any] = {self.keys.queue(name): start for name in queues}
        by_stream = {self.keys.queue(name): name for name in queues}
        reply: Any = await self.client.xreadgroup(GROUP, self.worker_id, streams, count=count, block=block_ms)
        return [
            _delivery(by_stream[_text(stream)], entry_id, fields)
            for stream, entries in reply or []
            for entry_id, fields in entries
        ]


def _listeners(data: bytes) -> list[str]:
    try:
        names = unpack(data, MAX_LISTENERS_BYTES)
    except MessageError:
        return []  # as if nobody listened: whoever does attaches again
    return [name for name in names if type(name) is str] if type(names) is list else []


def _pairs(values: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(values[::2], values[1::2], strict=True))


def _text(value: Any) -> str:
    # What is not UTF-8 is none of ours: it is looked up, not found, and dropped, and stops no loop.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
