"""Runs one line of a batch: submits it as the call that it is, waits for its end, and reads its answer from Redis.

The id of the call follows from the batch and the number of the line. So a gateway that takes a window over submits its
lines again, and Redis takes those that it has for duplicates: they run on, or have ended, token for token.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from functools import partial

from multidict import CIMultiDict, CIMultiDictProxy

from quire.gateway.admission.terms import read_terms
from quire.gateway.api import resume
from quire.gateway.api.call import Call
from quire.gateway.api.labels import user_hash
from quire.gateway.errors.api_errors import (
    ApiError,
    BrokerDown,
    Cancelled,
    DeadlinePassed,
    ImageTimeout,
    NoWorkers,
    QueueIsFull,
    RateLimited,
    ServerBusy,
    StorageDown,
)
from quire.gateway.features.batches.batch import Batch
from quire.gateway.features.batches.line import BatchLine, call_id_of
from quire.gateway.features.batches.line_endpoints import Answer, LineEndpoints, read_answer
from quire.gateway.features.batches.slots import Turn
from quire.gateway.serving import calls
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway, LineMemory
from quire.gateway.stream.buffer import OutputBuffer, ParkedOutcome
from quire.gateway.stream.call_metadata import request_id
from quire.shared.process.backoff import Backoff
from quire.shared.protocol.broker import Admission, QueueBounds
from quire.shared.protocol.keys import BATCH_CLASS, LINE_RETENTION_S
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.states import COMPLETE

# The tier of the class; see `labels.CLASSES`.
TIER = "flex"
# The part of the bounds of the queue that lines may fill: the rest is for clients that wait.
SHARE = 4
# Seconds between two attempts to submit a line that the queue or a limit does not allow now, and between two looks at a
# parked line.
PAUSE_S = (0.1, 2.0)
PARKED_S = (2.0, 10.0)
# Errors after which a line is submitted again.
_PASSING = (BrokerDown, QueueIsFull, NoWorkers)
# Errors of the files and images of a line. It is tried MAX_TRIES times, with AGAIN_S seconds in between.
_OF_FILES = (ServerBusy, StorageDown, ImageTimeout)
MAX_TRIES = 8
AGAIN_S = (1.0, 15.0)
_NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())


class LineLost(Exception):
    """Redis has lost a call that it had accepted, so its window is run again."""


class LineParked(Exception):
    """A request of the line is parked, so the line waits until it is unparked."""


class BatchEnded(Exception):
    """The batch was cancelled or has expired before the line could be submitted."""


@dataclass(slots=True)
class BatchState:
    """The facts about a batch that its lines need while they run. The runner sets `is_cancelled`."""

    batch: Batch
    is_cancelled: bool = False
    # End of the batch on the monotonic clock of this process.
    ends_at: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the batch expires."""
        return self.ends_at - time.monotonic()

    @left_s.setter
    def left_s(self, value: float) -> None:
        """Note what Redis says: the clock of this process may be wrong."""
        self.ends_at = time.monotonic() + value

    @property
    def has_ended(self) -> bool:
        return self.is_cancelled or self.left_s <= 0


@dataclass(slots=True)
class RunLine:
    """A line that has ended, or could not be submitted.

    error: why there is no call. gateway: of the call. form: as of `LineEndpoint.form_of`. requests: of the call; 0 if
    unknown. has_failed: the call has no answer. ends_with_batch: the deadline of the call is the end of the batch.
    was_parked: the deadline has moved, or the call was parked for too long.
    """

    number: int
    custom_id: str
    call_id: str
    error: ApiError | BatchEnded | None = None
    gateway: Gateway | None = None
    form: object = None
    requests: int = 0
    has_failed: bool = False
    ends_with_batch: bool = True
    was_parked: bool = False


class LineRunner:
    """Runs the lines of one batch."""

    def __init__(self, directory: ModelDirectory, endpoints: LineEndpoints, state: BatchState) -> None:
        self._directory = directory
        self._endpoints = endpoints
        self._state = state
        self._batch = state.batch
        # The requests of the lines in flight, with their models.
        self._open: dict[str, Gateway] = {}

    async def run(self, line: BatchLine, turn: Turn, *, was_begun: bool) -> RunLine:
        """Run a line to its end. was_begun: another gateway may have submitted it. Raises LineLost.

        The line has a slot while it is submitted, and in the queue or at a worker, and none while it waits for a limit.
        """
        run = RunLine(line.number, line.custom_id, call_id_of(self._batch.id, line.number))
        backoff, parked = Backoff(*PAUSE_S, jitter=True), Backoff(*PARKED_S, jitter=True)
        again, tries = Backoff(*AGAIN_S, jitter=True), 1
        while True:
            await turn.wait()
            # The first pause is that of all lines of the owner, the other that of this line.
            pause_s = own_pause_s = 0.0
            memory = LineMemory(self._directory.process.bodies)
            try:
                if self._state.has_ended and not (was_begun and await self._is_known(run.call_id)):
                    run.error, run.has_failed = BatchEnded(), True
                    return run
                await self._run_once(line, run, turn, memory, was_begun=was_begun)
                return run
            except _PASSING:
                pause_s = backoff.next()
            except LineParked:
                was_begun = run.was_parked = True
                own_pause_s = parked.next()
            except _OF_FILES as error:
                if tries == MAX_TRIES:
                    run.error, run.has_failed = error, True
                    return run
                tries += 1
                own_pause_s = again.next()
            except RateLimited as error:
                if error.headers.get("X-Should-Retry") == "false":
                    run.error, run.has_failed = error, True
                    return run
                pause_s = min(PAUSE_S[1], max(PAUSE_S[0], int(error.headers.get("Retry-After-Ms", 1000)) / 1000))
            except ApiError as error:
                run.error, run.has_failed = error, True
                return run
            finally:
                memory.release()
                turn.give_back(pause_s)
            if own_pause_s:
                await asyncio.sleep(own_pause_s)

    async def _run_once(
        self, line: BatchLine, run: RunLine, turn: Turn, memory: LineMemory, *, was_begun: bool
    ) -> None:
        directory, batch = self._directory, self._batch
        # 1) Read the call, with the limits that the key has now.
        caller = await directory.process.keys.ring.owner(batch.owner)
        gateway = run.gateway = directory.choose(line.body.get("model"), caller)
        endpoint = self._endpoints.at(batch.endpoint, gateway, batch.owner)
        call = gateway.key_limits.restricted(caller, _in_class(await endpoint.read(line.body, memory.hold)), line.body)
        run.form = endpoint.form_of(call)
        requests = call.requests(run.call_id)
        run.requests = len(requests)
        ids = [request.id for request in requests]
        # 2) Listen before the requests are submitted, so that no frame is missed.
        with gateway.listening(ids) as buffer:
            user = user_hash(call.user, gateway.user_hash_key)
            terms, run.ends_with_batch = self._terms(gateway, call, line)
            terms = gateway.key_limits.charged(caller, call.model, terms, user)
            metadata = call.metadata(endpoint.name, int(time.time()))
            await gateway.submission.submit(requests, terms._replace(metadata=metadata.encode()), call.files)
            call = replace(call, files={})
            memory.release()
            turn.accepted()
            self._open.update(dict.fromkeys(ids, gateway))
            try:
                if self._state.has_ended:
                    await self._cancel(dict.fromkeys(ids, gateway))
                if was_begun:
                    await self._attach(gateway, buffer, run.call_id)
                else:
                    buffer.accept(terms.deadline_ms / 1000, is_logged=False)
                # 3) Wait for the end. The answer stays in the output log until the window is written.
                run.has_failed = not await self._wait(gateway, buffer)
            finally:
                for id_ in ids:
                    self._open.pop(id_, None)

    def _terms(self, gateway: Gateway, call: Call, line: BatchLine) -> tuple[Admission, bool]:
        """Return the terms of a call, and whether its deadline is the end of the batch."""
        settings, left_ms = gateway.settings, max(1, math.ceil(1000 * self._state.left_s))
        terms = gateway.submission.terms._replace(
            deadline_ms=0,
            retention_s=LINE_RETENTION_S,
            counts_stored=False,
            bounds=QueueBounds(
                max(1, settings.max_queued_requests // SHARE), max(1, settings.max_queued_tokens // SHARE)
            ),
        )
        terms = read_terms(terms, _NO_HEADERS, line.body, self._batch.endpoint, call, settings.max_timeout_s)
        deadline_ms = min(terms.deadline_ms or left_ms, left_ms)
        return terms._replace(deadline_ms=deadline_ms), deadline_ms == left_ms

    async def _attach(self, gateway: Gateway, buffer: OutputBuffer, call_id: str) -> None:
        """Have the output published to this gateway, and read what was published before. Raises LineLost."""
        known = await self._look_up(gateway, call_id)
        if not await calls.attach(gateway, buffer, known):
            raise LineLost

    async def _wait(self, gateway: Gateway, buffer: OutputBuffer) -> bool:
        """Wait until all requests have ended. Returns False if one has failed: then the others are cancelled.

        Raises LineParked if none has failed and one is parked.
        """
        unfinished, failed, parked = set(buffer.cursors), False, False

        def drain() -> bool:
            nonlocal failed, parked
            for item in buffer.take():
                if isinstance(item.outcome, ParkedOutcome):
                    unfinished.discard(item.request_id)
                    parked = True
                elif item.outcome is not None:
                    unfinished.discard(item.request_id)
                    failed = failed or item.outcome.name not in COMPLETE
            return bool(unfinished) and not failed

        buffer.sink = drain
        try:
            told = False
            while unfinished:
                await buffer.ready()
                drain()
                if failed and unfinished and not told:
                    told = True
                    await self._cancel(dict.fromkeys(unfinished, gateway))
        finally:
            buffer.sink = None
        if parked and not failed:
            raise LineParked
        return not failed

    async def cancel_open(self) -> None:
        """Cancel the lines in flight."""
        await self._cancel(dict(self._open))

    async def _cancel(self, requests: dict[str, Gateway]) -> None:
        commands = (gateway.retry(partial(gateway.broker.cancel, id_)) for id_, gateway in requests.items())
        await asyncio.gather(*commands, return_exceptions=True)

    async def _look_up(self, gateway: Gateway, call_id: str) -> resume.StoredCall:
        """Look a line up in Redis. Raises LineLost and BrokerDown."""
        try:
            known = await gateway.retry(partial(resume.look_up, gateway.broker, call_id, self._batch.owner))
        except MessageError as error:
            calls.note_corrupt_metadata(gateway, call_id, error)
            await gateway.retry(partial(gateway.broker.delete, call_id))
            raise LineLost from error
        if known is None:
            raise LineLost
        return known

    async def answer(self, run: RunLine) -> Answer:
        """Read the answer to a line that has ended. Raises ApiError if it failed, LineLost and BrokerDown."""
        gateway = run.gateway
        if run.error is not None or gateway is None:
            raise run.error if isinstance(run.error, ApiError) else LineLost
        known = await self._look_up(gateway, run.call_id)
        endpoint = self._endpoints.at(self._batch.endpoint, gateway, self._batch.owner)
        return await read_answer(endpoint, gateway, run.call_id, known.metadata, run.form)

    def gateway_of_lane(self) -> Gateway | None:
        """Return the model of the batch; None if this process does not serve it."""
        return self._directory.find(self._batch.lane)

    async def _is_known(self, call_id: str) -> bool:
        """Return True if Redis has the call of a line. Raises BrokerDown."""
        gateway = self.gateway_of_lane()
        if gateway is None:
            return False
        key = gateway.broker.keys.request(call_id)
        return bool(await gateway.retry(partial(gateway.broker.client.exists, key)))

    async def delete(self, call_id: str, gateway: Gateway, count: int) -> None:
        """Delete what Redis has of a line whose answer is stored. Raises BrokerDown.

        count: the requests of the line; 0 if unknown.
        """
        if not count:
            try:
                known = await gateway.retry(partial(resume.look_up, gateway.broker, call_id, self._batch.owner))
                count = known.metadata.requests if known is not None else 1
            except MessageError:
                count = 1
        # The first request is deleted last: it tells how many there are.
        for index in reversed(range(count)):
            await gateway.retry(partial(gateway.broker.delete, request_id(call_id, index)))

    def stopped_by_end(self, run: RunLine, error: ApiError) -> bool:
        """Return True if the end of the batch is the reason of an error."""
        if isinstance(error, Cancelled):
            return self._state.has_ended
        return isinstance(error, DeadlinePassed) and run.ends_with_batch and not run.was_parked


def _in_class(call: Call) -> Call:
    """Return a call that runs in the class of batches and needs no client."""
    tier = TIER if call.about.service_tier else ""
    about = replace(call.about, is_background=True, service_tier=tier)
    return replace(call, priority=BATCH_CLASS, about=about)
