"""Submits the requests of a call to the queue, all of them or none."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from redis.exceptions import WatchError

from quire.gateway.admission.canceller import Canceller
from quire.gateway.admission.retry import RetryPolicy
from quire.gateway.admission.service_rate import MAX_RETRY_AFTER_S, ServiceRate
from quire.gateway.admission.worker_registry import WorkerRegistry
from quire.gateway.errors.api_errors import (
    ApiError,
    DeadlineOutOfReach,
    IdempotencyKeyReused,
    MemoryIsFull,
    QueueIsFull,
    conversation_locked,
)
from quire.gateway.stream.call_metadata import request_id
from quire.shared.protocol.broker import (
    Admission,
    Broker,
    ConversationLocked,
    DeadlineUnreachable,
    IdempotencyConflict,
    NoRoom,
    QueueBounds,
    QueueFull,
    Submitted,
)
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.charge import LimitReached
from quire.shared.protocol.keys import image_name
from quire.shared.protocol.messages import GenerationRequest
from quire.shared.protocol.states import OutcomeName

# Maximum number of attempts to submit with an idempotency key whose call was cancelled meanwhile.
ATTEMPTS = 3
# Maximum number of requests of a call that are submitted at the same time.
BATCH = 16
NO_FILES: Mapping[str, bytes] = {}


class Submission:
    """Submits all requests of a call, or none of them."""

    def __init__(
        self,
        broker: Broker,
        terms: Admission,
        worker_registry: WorkerRegistry,
        retry: RetryPolicy,
        is_wanted: Callable[[str], bool],
        refusal: Callable[[LimitReached, Admission | None], ApiError],
    ) -> None:
        """terms: of a call that asks for nothing else. refusal: returns the error for a call that a limit of its key
        refuses.
        """
        self.terms = terms
        self._broker = broker
        self._worker_registry = worker_registry
        self._retry = retry
        self._refusal = refusal
        self.canceller = Canceller(broker, terms.gateway, is_wanted)

    async def submit(
        self, requests: Sequence[GenerationRequest], terms: Admission, files: Mapping[str, bytes] = NO_FILES
    ) -> Submitted:
        """Accept the requests of a call into the queue, on the same terms. files: by digest, those of their images,
        and of images that Redis keeps with them.

        Returns the id of the first request of the call, and the limits after the last one. If the idempotency key was
        used before, the id is that of the earlier call, and all requests of the earlier call are in Redis.

        Raises BrokerDown, QueueIsFull, DeadlineOutOfReach, MemoryIsFull, IdempotencyKeyReused, RateLimited or
        BudgetSpent; then no request of this call runs. Raises InvalidRequest if another response continues its
        conversation.
        """
        await self._retry.check_subscribed()
        ids = [request.id for request in requests]
        # A submission that has begun is finished even if the client leaves: its result tells what to cancel.
        work = asyncio.ensure_future(self._submit_all(requests, terms, files))
        try:
            return await asyncio.shield(work)
        except BaseException:
            work.add_done_callback(lambda done: self._abandon(done, ids, terms))
            raise

    def _abandon(self, work: asyncio.Future[Submitted], ids: Sequence[str], terms: Admission) -> None:
        failed = work.cancelled() or work.exception() is not None
        if failed or not terms.is_background:
            # A client that came with the same Idempotency-Key meanwhile keeps the requests alive. If the key stood for
            # another call, this gateway may be listed as a listener of that call's requests.
            first = ids[0] if failed else work.result().id
            self.canceller.cancel([request_id(first, index) for index in range(len(ids))])

    async def _submit_all(
        self, requests: Sequence[GenerationRequest], terms: Admission, files: Mapping[str, bytes]
    ) -> Submitted:
        try:
            submitted = await self._submit_first(requests[0], terms, files)
            first = submitted.id
            # The first id gives the ids of the rest. Requests that a first gateway failed to submit are submitted now.
            others = terms._replace(
                idempotency_key="", conversation=b"", beside="" if first == requests[0].id else first
            )
            rest = [replace(request, id=request_id(first, index)) for index, request in enumerate(requests) if index]
            for at in range(0, len(rest), BATCH):
                submissions = (self._submit(request, others, files) for request in rest[at : at + BATCH])
                # All of a batch end, also if one fails: a submission that is given up may still reach Redis.
                for result in await asyncio.gather(*submissions, return_exceptions=True):
                    if isinstance(result, BaseException):
                        raise result
                    submitted = Submitted(first, result.rates or submitted.rates)
        except QueueFull as error:
            raise queue_is_full(error, self._worker_registry.rate) from error
        except DeadlineUnreachable as error:
            raise out_of_reach(error, terms.deadline_ms) from error
        except NoRoom as error:
            raise memory_is_full(error, terms.bounds) from error
        except LimitReached as error:
            raise self._refusal(error, terms) from error
        except ConversationLocked as error:
            raise conversation_locked() from error
        except IdempotencyConflict as error:
            raise IdempotencyKeyReused(
                "The Idempotency-Key stands for a call with another body. Send the same body, or choose another key."
            ) from error
        return submitted

    async def _submit_first(
        self, request: GenerationRequest, terms: Admission, files: Mapping[str, bytes]
    ) -> Submitted:
        """Submit with the idempotency key. If the key stands for a cancelled call, free the key and try again."""
        for _ in range(ATTEMPTS):
            submitted = await self._submit(request, terms, files)
            if submitted.id == request.id:
                break
            if not await self._retry(partial(self._free_cancelled, terms.idempotency_key, submitted.id)):
                break
        return submitted

    async def _free_cancelled(self, key: str, first: str) -> bool:
        """Delete the key if it still stands for the request `first` and that was cancelled.

        Returns True if another attempt with the key may succeed.
        """
        keys = self._broker.keys
        outcome, cancel = await self._broker.client.hmget(keys.request(first), "outcome", "cancel")
        if text(outcome) != OutcomeName.CANCELLED and (outcome is not None or cancel is None):
            return False
        async with self._broker.client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.idempotency(key))
            if await pipe.hget(keys.idempotency(key), "id") == first.encode():
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.delete(keys.idempotency(key))
                with contextlib.suppress(WatchError):
                    await pipe.execute()
        return True

    async def _submit(self, request: GenerationRequest, terms: Admission, files: Mapping[str, bytes]) -> Submitted:
        terms = terms._replace(
            cost=request.cost,
            prompt_tokens=len(request.prompt),
            rows=request.rows,
            # Further prompts of a call have a number behind its id.
            begins_call="-" not in request.id,
            images=tuple(image_name(request.cache_scope, digest) for digest in files),
            pins=bool(request.breakpoints),
        )
        # A command whose reply was lost may have been executed; to execute it again is harmless.
        return await self._retry(
            partial(self._broker.submit, request.id, request.encode(), terms, list(files.values()))
        )


def queue_is_full(error: QueueFull, rate: ServiceRate) -> QueueIsFull:
    """Return the error of the API for a queue that is at its bound. rate: at which requests of the queue end."""
    return QueueIsFull(
        f"The queue is full: {error.requests} requests with {error.tokens} tokens wait. Try again later.",
        headers={"Retry-After": str(rate.retry_after_s(error.requests))},
    )


def out_of_reach(error: DeadlineUnreachable, deadline_ms: int) -> DeadlineOutOfReach:
    """Return the error of the API for a call that would end after its deadline, with the times that would do."""
    end_ms = error.wait_ms + error.service_ms
    retry_s = max(1, min(MAX_RETRY_AFTER_S, math.ceil(min(error.wait_ms, end_ms - deadline_ms) / 1000)))
    end_s = math.ceil(end_ms / 100) / 10
    return DeadlineOutOfReach(
        f"The deadline of {deadline_ms / 1000:g} s cannot be met: {error.ahead} requests come before this one, and it "
        f"would end in {end_s:g} s. Send it again in {retry_s} s, or now with a timeout of more than {end_s:g} s.",
        headers={"Retry-After": str(retry_s)},
    )


def memory_is_full(error: NoRoom, bounds: QueueBounds) -> MemoryIsFull:
    """Return the error of the API for a call that must stay in Redis while there is no room for it."""
    if error.key:
        holder, most = f"of the API key {error.key}", bounds.key_bytes
        settings = "--max-stored-bytes and --max-key-share"
    else:
        holder, most, settings = "of all clients", bounds.stored_bytes, "--max-stored-bytes"
    if error.wait_ms >= 0:
        retry = {"Retry-After": str(math.ceil(error.wait_ms / 1000))}
    else:  # the owner of the key must act, or others must
        retry = {"X-Should-Retry": "false"} if error.key else {"Retry-After": "60"}
    return MemoryIsFull(
        f"The stored, background and parked calls {holder} take {error.held} bytes, and with this one more than {most} "
        f"(this server's settings {settings}). Delete stored responses, cancel or unpark parked calls, or send "
        "store: false without background.",
        headers=retry,
    )
