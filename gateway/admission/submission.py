"""Puts requests into the queue, and takes them out again when nobody wants them any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from redis.exceptions import RedisError, WatchError

from quire.gateway.admission.admission_options import AdmissionOptions
from quire.gateway.admission.retry import RetryPolicy
from quire.gateway.admission.worker_registry import WorkerRegistry
from quire.gateway.api import call
from quire.gateway.api.errors import IdempotencyKeyReused, QueueIsFull
from quire.shared.broker import Broker, IdempotencyConflict, QueueBounds, QueueFull
from quire.shared.messages import GenerationRequest
from quire.shared.states import CancelReply, ExpireReply

log = logging.getLogger("gateway")

# How often an idempotency key is tried whose call was cancelled meanwhile.
ATTEMPTS = 3
# How long cancellations are tried while Redis is away, and how many may wait.
CANCEL_PAUSE_S = 0.5
MAX_CANCELLATIONS = 100_000


class Canceller:
    """Ends requests in the background, for as long as Redis takes to answer.

    What has found a listener by then may go on: here (`is_wanted`), or at another gateway that lives.
    """

    def __init__(self, broker: Broker, gateway_id: str, is_wanted: Callable[[str], bool]) -> None:
        self._broker = broker
        self._gateway_id = gateway_id
        self._is_wanted = is_wanted
        self.cancelled = 0
        # By request id: what ends it.
        self._waiting: dict[str, Callable[[str], Awaitable[object]]] = {}
        # Those of which Redis is being asked.
        self._asked: dict[str, Callable[[str], Awaitable[object]]] = {}
        # Not cancelled because somebody here listens, who may leave before answering for it.
        self._spared: set[str] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._run())

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._add(request_ids, self._cancel_unwanted)

    def left(self, request_ids: Iterable[str]) -> None:
        """Nobody here listens to these any more. What was spared for who did is cancelled after all."""
        spared = self._spared.intersection(request_ids)
        self._spared -= spared
        self.cancel(tuple(spared))

    def expire(self, request_ids: Sequence[str]) -> None:
        """End requests whose clients have been told that the deadline has passed."""
        self._add(request_ids, self._expire)

    def _add(self, request_ids: Sequence[str], end: Callable[[str], Awaitable[object]]) -> None:
        for request_id in request_ids:
            if len(self._waiting) < MAX_CANCELLATIONS:
                self._waiting[request_id] = end
        if self._waiting:
            self._idle.clear()
            self._wake.set()

    async def close(self, timeout_s: float) -> None:
        """End when everything is cancelled, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            left = len(self._waiting.keys() | self._asked.keys())
            log.warning("%d requests could not be cancelled: Redis does not answer", left)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                # Taken out first: what is added while Redis is asked is asked again, for its listener may be another.
                batch = {request_id: self._waiting.pop(request_id) for request_id in list(self._waiting)[:16]}
                self._asked = batch
                results = await asyncio.gather(*(end(id_) for id_, end in batch.items()), return_exceptions=True)
                self._asked = {}
                failed = False
                for (request_id, end), result in zip(batch.items(), results, strict=True):
                    if isinstance(result, (RedisError, OSError)):
                        self._waiting.setdefault(request_id, end)
                        failed = True
                    elif isinstance(result, BaseException):
                        log.error(
                            "request %s cannot be cancelled",
                            request_id,
                            exc_info=result,
                            extra={"request_id": request_id},
                        )
                if failed:
                    await asyncio.sleep(CANCEL_PAUSE_S)
            self._idle.set()

    async def _cancel_unwanted(self, request_id: str) -> None:
        if self._spares(request_id):
            return
        others = await self._broker.detach(request_id, self._gateway_id)
        if await self._broker.live_gateways(others) or self._spares(request_id):
            return
        # Whoever has attached to it by now, at whichever gateway, keeps it alive. What was refused is unknown, and what
        # has ended meanwhile is done.
        if await self._broker.cancel(request_id, unless_beside=others) in (CancelReply.CANCELLED, CancelReply.FLAGGED):
            self.cancelled += 1

    def _spares(self, request_id: str) -> bool:
        wanted = self._is_wanted(request_id)
        if wanted:
            self._spared.add(request_id)
        return wanted

    async def _expire(self, request_id: str) -> None:
        if await self._broker.expire(request_id) is ExpireReply.EARLY:
            await self._cancel_unwanted(request_id)


class Submission:
    """Submits all requests of a call, or none of them."""

    def __init__(
        self,
        broker: Broker,
        gateway_id: str,
        bounds: QueueBounds,
        fleet: WorkerRegistry,
        patience: RetryPolicy,
        is_wanted: Callable[[str], bool],
    ) -> None:
        self._broker = broker
        self._gateway_id = gateway_id
        self._bounds = bounds
        self._fleet = fleet
        self._patience = patience
        self.canceller = Canceller(broker, gateway_id, is_wanted)

    async def submit(self, requests: Sequence[GenerationRequest], about: bytes, terms: AdmissionOptions) -> str:
        """Accept the requests of a call into the queue.

        Returns the id of the first one, which is another where the idempotency key was used before: then the requests
        of that call are all there. Raises BrokerDown, QueueIsFull or IdempotencyKeyReused; then nothing of them runs.
        """
        await self._patience.check_subscribed()
        ids = [request.id for request in requests]
        # A submission that has begun is finished even if the client leaves, so that it is known what to cancel.
        work = asyncio.ensure_future(self._submit_all(requests, about, terms))
        try:
            return await asyncio.shield(work)
        except BaseException:
            work.add_done_callback(lambda done: self._abandon(done, ids, terms))
            raise

    def _abandon(self, work: asyncio.Future[str], ids: Sequence[str], terms: AdmissionOptions) -> None:
        failed = work.cancelled() or work.exception() is not None
        if failed or not terms.is_background:
            # Who came with the same Idempotency-Key meanwhile, here or at another gateway, has it still. Where the key
            # stood for another call this gateway may be among those that listen to its requests.
            first = ids[0] if failed else work.result()
            self.canceller.cancel([call.request_id(first, index) for index in range(len(ids))])

    async def _submit_all(self, requests: Sequence[GenerationRequest], about: bytes, terms: AdmissionOptions) -> str:
        try:
            first = await self._submit_first(requests[0], about, terms)
            # The other ids follow from the first. What the gateway of a first call could not submit is made up for.
            others = replace(terms, idempotency_key="")
            beside = "" if first == requests[0].id else first
            for index, request in enumerate(requests[1:], start=1):
                await self._submit(replace(request, id=call.request_id(first, index)), about, others, beside)
        except QueueFull as error:
            raise QueueIsFull(
                f"The queue is full: {error.requests} requests with {error.tokens} tokens wait. Try again later.",
                headers={"Retry-After": str(self._fleet.rate.retry_after_s(error.requests))},
            ) from error
        except IdempotencyConflict as error:
            raise IdempotencyKeyReused(
                "The Idempotency-Key stands for a call with another body. Send the same body, or choose another key."
            ) from error
        return first

    async def _submit_first(self, request: GenerationRequest, about: bytes, terms: AdmissionOptions) -> str:
        """Submit with the idempotency key. One whose call was cancelled, because its client left, is free again."""
        for _ in range(ATTEMPTS):
            first = await self._submit(request, about, terms)
            if first == request.id:
                break
            if not await self._patience(partial(self._free_cancelled, terms.idempotency_key, first)):
                break
        return first

    async def _free_cancelled(self, key: str, first: str) -> bool:
        """Forget the key if it still stands for `first` and that was cancelled; whether it is worth another try."""
        keys = self._broker.keys
        outcome, cancel = await self._broker.client.hmget(keys.request(first), "outcome", "cancel")
        if outcome != b"cancelled" and (outcome is not None or cancel is None):
            return False
        async with self._broker.client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.idempotency(key))
            if await pipe.hget(keys.idempotency(key), "id") == first.encode():
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.delete(keys.idempotency(key))
                with contextlib.suppress(WatchError):
                    await pipe.execute()
        return True

    async def _submit(self, request: GenerationRequest, about: bytes, terms: AdmissionOptions, beside: str = "") -> str:
        # One whose reply was lost may have been carried out; making it again is harmless.
        return await self._patience(
            partial(
                self._broker.submit,
                request.id,
                request.encode(),
                gateway=self._gateway_id,
                cost=request.cost,
                bounds=self._bounds,
                priority_class=terms.priority_class,
                deadline_ms=terms.deadline_ms,
                about=about,
                is_background=terms.is_background,
                idempotency_key=terms.idempotency_key,
                fingerprint=terms.fingerprint,
                traceparent=terms.traceparent,
                beside=beside,
            )
        )
