"""The verbs of a gateway: submit requests, listen to them, cancel them, and look at workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.asyncio import Redis

from quire.shared.protocol.admission import Admission
from quire.shared.protocol.broker.lane import Lane, text
from quire.shared.protocol.charge import LimitReached, RateState, tightest
from quire.shared.protocol.keys import GATEWAY_TTL_S, QUEUES, RETENTION_S, VIEW_TTL_S
from quire.shared.protocol.messages import MessageError, StepItem, WorkerCard, decode_items
from quire.shared.protocol.states import CancelReply, DeleteReply, ExpireReply, RequestState, SubmitReply


class IdempotencyConflict(Exception):
    """The idempotency key was used for a call with another body."""


class QueueFull(Exception):
    """The queue is at its bound. Carries the waiting requests and tokens, for Retry-After."""

    def __init__(self, requests: int, tokens: int) -> None:
        super().__init__(f"{requests} requests with {tokens} tokens are waiting")
        self.requests = requests
        self.tokens = tokens


class DeadlineUnreachable(Exception):
    """A request would end after its deadline. Carries the requests that are taken before it, and milliseconds."""

    def __init__(self, ahead: int, wait_ms: int, service_ms: int) -> None:
        super().__init__(f"the request would end in {wait_ms + service_ms} ms")
        self.ahead = ahead
        self.wait_ms = wait_ms
        self.service_ms = service_ms


class NoRoom(Exception):
    """The requests that stay in Redis take as many bytes as they may.

    key: id of the API key whose bound is reached; empty for the bound of all requests. wait_ms: until the oldest
    request of the caller may go; -1 if none has ended.
    """

    def __init__(self, key: str, held: int, wait_ms: int) -> None:
        super().__init__(f"{held} bytes are held")
        self.key = key
        self.held = held
        self.wait_ms = wait_ms


class ConversationLocked(Exception):
    """Another response continues the conversation, or its items have changed since the caller read them."""


class FilesLost(Exception):
    """Redis does not have a file that a submission left out."""


@dataclass(frozen=True, slots=True)
class LastBeat:
    """The last heartbeat of a worker: its age, and the time between two heartbeats."""

    age_s: float
    every_s: float


class Submitted(NamedTuple):
    """A request that was submitted.

    id: of the request that stands for the call: an earlier one if the idempotency key was used before.
    rates: the tightest limits per minute of the accounts after the request, see `tightest`. is_left: to one worker,
    until `withdraw`.
    """

    id: str
    rates: Mapping[str, RateState] = {}
    is_left: bool = False


@dataclass(frozen=True, slots=True)
class Attachment:
    """A request that a gateway has attached to. `metadata` is that of its call."""

    is_done: bool
    metadata: bytes


def check_refusal(reply: Sequence[Any]) -> None:
    """Raise QueueFull or LimitReached if `submit` or `unpark` was refused for that reason."""
    if text(reply[0]) == SubmitReply.FULL:
        raise QueueFull(int(reply[1]), int(reply[2]))
    if text(reply[0]) == SubmitReply.LIMITED:
        raise LimitReached(text(reply[1]), text(reply[2]), int(reply[3]))


# Calls of `submit` that each make a part of the room for a request; then the caller is refused, and may come back.
ROOM_ATTEMPTS = 16


class GatewayVerbs(Lane):
    """The verbs of a gateway."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._submit = self.script("submit")
        self._attach = self.script("attach")
        self._detach = self.script("detach")
        self._cancel = self.script("cancel")
        self._expire = self.script("expire")
        self._delete = self.script("delete")
        # Held while files are sent: other commands wait for them on the connection, while their time runs.
        self._files_turn = asyncio.Lock()

    async def submit(self, request_id: str, body: bytes, terms: Admission, files: Sequence[bytes] = ()) -> Submitted:
        """Accept a request into the queue; calls with the same id accept it once. files: of `terms.images`.

        Files that Redis has are not sent. Raises QueueFull, DeadlineUnreachable, NoRoom, IdempotencyConflict,
        LimitReached and ConversationLocked.
        """
        if not files:
            return await self._submit_with(request_id, body, terms, files)
        async with self._files_turn:
            pipe = self.client.pipeline(transaction=False)
            for name in terms.images:
                pipe.exists(self.keys.image(name))
            new = [b"" if is_known else file for is_known, file in zip(await pipe.execute(), files, strict=True)]
            try:
                return await self._submit_with(request_id, body, terms, new)
            except FilesLost:
                return await self._submit_with(request_id, body, terms, files)

    async def _submit_with(self, request_id: str, body: bytes, terms: Admission, files: Sequence[bytes]) -> Submitted:
        """Accept a request, with those of its files that are not empty. Raises FilesLost too."""
        request = self.keys.request(request_id)
        keys = [request, self.keys.idempotency(terms.idempotency_key) if terms.idempotency_key else request]
        args = [self.keys.prefix, request_id, body, terms.encode(), *files]
        for _ in range(ROOM_ATTEMPTS):
            reply = await self._submit(keys=keys, args=args)
            found = SubmitReply(text(reply[0]))
            if found is not SubmitReply.NO_ROOM or int(reply[3]):
                break
        check_refusal(reply)
        if found is SubmitReply.LATE:
            raise DeadlineUnreachable(*map(int, reply[1:]))
        if found is SubmitReply.NO_ROOM:
            raise NoRoom(terms.owner if text(reply[1]) == "key" else "", int(reply[2]), int(reply[3]))
        if found is SubmitReply.LOCKED:
            raise ConversationLocked(terms.joins[0])
        if found is SubmitReply.NO_FILES:
            raise FilesLost(request_id)
        if found is SubmitReply.CONFLICT:
            raise IdempotencyConflict(terms.idempotency_key)
        first = text(reply[1]) if found is SubmitReply.SAME else request_id
        return Submitted(first, *((tightest(reply[2]), bool(reply[3])) if found is SubmitReply.ACCEPTED else ()))

    async def attach(self, request_id: str, gateway: str) -> Attachment | None:
        """Publish the output of a request to `gateway` from now on. Returns None for an unknown request."""
        reply = await self._attach(keys=[self.keys.request(request_id)], args=[gateway])
        return Attachment(text(reply[0]) == RequestState.DONE, reply[1]) if reply else None

    async def detach(self, request_id: str, gateway: str) -> list[str]:
        """Remove `gateway` from the listeners of a request. Returns the remaining gateways; some may have died."""
        return list(map(text, await self._detach(keys=[self.keys.request(request_id)], args=[gateway])))

    async def cancel(self, request_id: str, unless_beside: Sequence[str] | None = None) -> CancelReply:
        """Stop a request, waiting or running.

        unless_beside: do nothing (WANTED) if a gateway that is not one of these listens to it.
        """
        args: list[Any] = [self.keys.prefix, request_id, RETENTION_S, "" if unless_beside is None else "1"]
        reply = await self._cancel(keys=[self.keys.request(request_id)], args=[*args, *(unless_beside or ())])
        return CancelReply(text(reply))

    async def expire(self, request_id: str) -> ExpireReply:
        """End a request whose deadline has passed, waiting or running."""
        keys = [self.keys.request(request_id)]
        return ExpireReply(text(await self._expire(keys=keys, args=[self.keys.prefix, request_id, RETENTION_S])))

    async def delete(self, request_id: str) -> DeleteReply:
        """Delete the metadata, the output log and the conversation of a request; once it has ended, all of it."""
        keys = [self.keys.request(request_id)]
        return DeleteReply(text(await self._delete(keys=keys, args=[self.keys.prefix, request_id])))

    async def read_output(self, request_id: str, after: int = 0, count: int | None = None) -> list[StepItem]:
        """Return the items of the output log that end after token `after`, including the terminal one.

        count: largest number of log entries read. One of them may end at `after`, and gives no item.
        """
        # The terminal item may have no tokens: its entry is `<tokens>-1`, so the range starts at `after` itself.
        entries: Any = await self.client.xrange(self.keys.output(request_id), min=f"{after}-0", count=count)
        items = [item for _, fields in entries for item in decode_items(fields[b"item"])]
        return [item for item in items if item.end > after or item.outcome is not None]

    async def drop_output(self, request_ids: Sequence[str]) -> None:
        """Delete the output logs of requests that have ended, before their time. No client may ask for them again."""
        await self.client.unlink(*map(self.keys.output, request_ids))

    async def note_repairs(self, count: int) -> None:
        """Count published items that did not arrive, and that a gateway read from the output log instead."""
        await self.client.hincrby(self.keys.recoveries, "repairs", count)

    async def refresh_gateway(self, gateway_id: str) -> None:
        """Renew the gateway's lease."""
        await self.client.set(self.keys.gateway_lease(gateway_id), "1", ex=GATEWAY_TTL_S)

    async def live_workers(self) -> list[WorkerCard]:
        """Return the cards of the lane's workers whose engine made progress within WORKER_TTL_S."""
        names = await self.client.zrange(self.keys.workers, 0, -1)
        if not names:
            return []
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hget(self.keys.worker(text(name)), "card")
        cards = []
        for name, data in zip(names, await pipe.execute(), strict=True):
            if data is not None:
                try:
                    cards.append(WorkerCard.decode(data))
                except MessageError as error:
                    # This gateway cannot use a worker of another version.
                    self.note_corrupt("worker card", text(name), error)
        return cards

    async def last_beats(self) -> list[LastBeat]:
        """Return the last heartbeat of each worker in `live_workers`."""
        names = await self.client.zrange(self.keys.workers, 0, -1)
        pipe = self.client.pipeline(transaction=False)
        pipe.time()
        for name in names:
            pipe.hmget(self.keys.worker(text(name)), "beat", "every", "card")
        (seconds, micros), *found = await pipe.execute()
        now_ms = 1000 * seconds + micros // 1000
        return [
            LastBeat(max(0, now_ms - int(beat)) / 1000, float(every))
            for beat, every, card in found
            if beat is not None and every is not None and card is not None
        ]

    async def look(self, worker_id: str) -> dict[str, int]:
        """Ask a worker to publish views of its engine for VIEW_TTL_S. Returns the number of requests in each queue."""
        pipe = self.client.pipeline(transaction=False)
        pipe.set(self.keys.view(worker_id), "1", px=int(1000 * VIEW_TTL_S))
        pipe.hmget(self.keys.load, *(f"requests:{name}" for name in QUEUES))
        _, waiting = await pipe.execute()
        return {name: max(0, int(count or 0)) for name, count in zip(QUEUES, waiting, strict=True)}

    async def queued(self) -> tuple[int, int]:
        """Return how many requests and tokens wait in this lane."""
        requests, tokens = await self.client.hmget(self.keys.load, "requests", "tokens")
        return int(requests or 0), int(tokens or 0)
