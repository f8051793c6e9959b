"""The buffered output of one call: every token once and in order, although pub/sub may lose or repeat messages.

Published items are a hint, the output log is the truth: a gap between items is read from the log. Items of a slow
client that do not fit in the buffer are read from the log, too. The buffer is bounded in tokens. A log-probability
counts as a token, since it is as large when it is written:

- MAX_WAITING tokens. The limit is checked before an item is added, so the last item may exceed it, and each other
  request of the call may add one item more, because the items of a call's requests arrive together.
- When a large item arrives at once it is drained in parts of MAX_TAKEN. Until no more than MAX_TAKEN are left, no
  request may add a second item.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from quire.gateway.errors.api_errors import Parked
from quire.gateway.stream.cursor import SILENCE_S, Cursor, cut, weight
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.messages import MessageError, Outcome, StepItem
from quire.shared.protocol.states import ExpireReply, OutcomeName, RequestState
from quire.shared.redis.cancellation import check_cancelled

log = logging.getLogger("gateway")

# Maximum number of tokens that are buffered for one call. A slower client gets the rest from the log.
MAX_WAITING = 256
# Tokens that are drained at once, such as from an answer that was ranked and arrives whole. Other calls run in between.
MAX_TAKEN = 1024
# Time after its deadline at which a request that has not ended is taken to have no worker that would end it.
OVERDUE_S = 1.0
# Largest number of log entries per read.
PAGE = 128


class NoWorkerOutcome(Outcome):
    """The end of a request that no worker took: its gateway gave it up, and its client may send it again."""

    __slots__ = ()
    NAME = OutcomeName.ERROR


class NotLoadedOutcome(NoWorkerOutcome):
    """The end of a request whose model cannot be loaded. The detail is the reason."""

    __slots__ = ()


class ParkedOutcome(Outcome):
    """The end of a stream whose request is parked. The request has not ended: it continues after it is unparked."""

    __slots__ = ()


class ClosedOutcome(Outcome):
    """The end of a stream that its gateway closes before the request ends. `detail` tells the client why."""

    __slots__ = ()

    NAME = "closed"


class RevokedOutcome(ClosedOutcome):
    """The end of a stream whose API key is no longer valid."""

    __slots__ = ()


class StreamStats:
    """Counts of all calls of one gateway."""

    def __init__(self) -> None:
        # Gaps in published output that were filled from a log.
        self.repairs = 0
        self.log_reads = 0
        self.corrupt_logs = 0
        # Arrival time of the latest frame, by time.perf_counter.
        self.frame_at = 0.0

    def note_corrupt_log(self, request_id: str, error: Exception) -> None:
        """Count a log that cannot be decoded; the first one is logged."""
        self.corrupt_logs += 1
        if self.corrupt_logs == 1:
            log.error(
                "the output log of request %s is corrupt (later ones are only counted): %s",
                request_id,
                error,
                extra={"request_id": request_id},
            )


class OutputBuffer:
    """The output of the requests of one call, for one consumer.

    The producer calls `feed` for each item, then `flush`. The consumer either awaits `next`, or sets `sink`: `flush`
    calls it directly, so that no task needs to wake up for the items.
    """

    def __init__(
        self,
        broker: Broker,
        request_ids: Sequence[str],
        keepalive_s: float,
        stats: StreamStats,
        check_at: Callable[[OutputBuffer, float], None],
        owner: str | None = None,
    ) -> None:
        """`check_at(buffer, due)` has `check` called at `due` on the loop's clock, or earlier.

        `owner`: id of the API key of the client; empty for a client without one, None without a client.
        """
        self._broker = broker
        self._stats = stats
        self._check_at = check_at
        self.owner = owner
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self.cursors = {request_id: Cursor(request_id, now) for request_id in request_ids}
        self._waiting: list[StepItem] = []
        self._waiting_tokens = 0
        # Generation counter: incremented when the buffer is drained, unless more than MAX_TAKEN tokens are left.
        self._generation = 0
        # True if the next `ready` lets other tasks run before the rest of a large item is drained.
        self._has_rest = False
        # Estimated weight of a log entry, from the last page that was read.
        self._tokens_per_entry = 1
        self._waiter: asyncio.Future[None] | None = None
        # True if `wake` was called since `ready` began.
        self._is_woken = False
        # Drains the buffer; returns False if the consumer's task must run.
        self.sink: Callable[[], bool] | None = None
        self._keepalive_s = keepalive_s
        self.opened_at = now
        self._taken_at = now
        self.keepalive_due = False
        self._silent: set[Cursor] = set()
        # True if a cursor is behind or silent, so that a log must be read.
        self._must_read = False
        # True once the requests are in Redis. A request that is missing there afterwards is lost.
        self.accepted = False
        # True if requests that have not ended are cancelled when the buffer is closed.
        self.is_responsible = False
        # Arrival time of the oldest buffered item, and of the oldest item last taken; 0 if read from the log.
        self._fed_at = 0.0
        self.came_at = 0.0
        # Requests that this gateway has ended; workers may still run them.
        self._given_up: set[str] = set()
        # Requests whose deadline has passed, and that are not ended in Redis because Redis did not answer.
        self.to_expire: list[str] = []
        # The time by which the requests must have ended, on the loop's clock.
        self.overdue_at = math.inf

    @property
    def unfinished(self) -> list[str]:
        """The requests that a worker may still run."""
        return [
            cursor.request_id
            for cursor in self.cursors.values()
            if not cursor.ended or cursor.request_id in self._given_up
        ]

    # --- producer: never blocks ---------------------------------------------------------------------------------------

    def feed(self, item: StepItem, now: float) -> None:
        """Add one published item. `flush` must follow after the last item that is at hand."""
        cursor = self.cursors[item.request_id]
        cursor.heard_at = now
        if cursor.silence_s > SILENCE_S:
            cursor.silence_s = SILENCE_S
            self._check_at(self, now + SILENCE_S)
        if self._waiting_tokens >= MAX_WAITING and cursor.generation == self._generation:
            cursor.behind = cursor.expects_log = True
        else:
            if not self._waiting:
                self._fed_at = self._stats.frame_at
            # `_add` is written out for items without log-probabilities, because this runs for every token.
            deltas = item.deltas
            if item.report is not None or len(deltas) != 1 or deltas[0].logprobs:
                self._add(cursor, item)
            else:
                before = cursor.next
                if (new := cursor.take(item)) is not None:
                    self._waiting.append(new)
                    cursor.generation = self._generation
                    self._waiting_tokens += cursor.next - before
        if cursor.behind:
            self._must_read = True

    def flush(self) -> None:
        """Hand the fed items to the consumer."""
        if self.sink is None or not self.sink() or self._must_read or self._waiting:
            self.wake()

    def accept(self, left_s: float | None, *, is_logged: bool) -> None:
        """Note that the requests are in Redis.

        `left_s`: seconds until their deadline, None without one; `is_logged`: whether they may have output already.
        """
        self.accepted = True
        if left_s is not None:
            self.overdue_at = self._loop.time() + left_s + OVERDUE_S
        if is_logged:
            self.suspect()
            for cursor in self.cursors.values():
                cursor.expects_log = cursor.behind

    def suspect(self) -> None:
        """Have every request compared with its log: messages may have been lost."""
        for cursor in self.cursors.values():
            cursor.behind = not cursor.ended
        self._must_read = True
        self.wake()

    def check(self, now: float) -> tuple[float, list[Cursor]]:
        """Notice that keepalives, deadlines and silent requests are due.

        Returns when to call it again, on the loop's clock, and the requests that have been silent for too long: the
        caller finds out whether their logs have more, and calls `read_log_of` for those.
        """
        silent: list[Cursor] = []
        due = self._taken_at + self._keepalive_s
        if now >= due:
            self.keepalive_due = True
            self.wake()
            due = now + self._keepalive_s
        if not self.accepted:
            return min(due, now + SILENCE_S), silent
        for cursor in self.cursors.values():
            if cursor.ended:
                continue
            if now - cursor.heard_at >= cursor.silence_s:
                cursor.heard_at = now
                if cursor.behind:
                    self.read_log_of(cursor)
                else:
                    silent.append(cursor)
            due = min(due, cursor.heard_at + cursor.silence_s)
        if now < self.overdue_at:
            return min(due, self.overdue_at), silent
        self._must_read = True
        self.wake()
        return min(due, now + SILENCE_S), silent

    def read_log_of(self, cursor: Cursor) -> None:
        """Have a silent request compared with its log."""
        self._silent.add(cursor)
        self._must_read = True
        self.wake()

    def give_up(self, outcome: NoWorkerOutcome) -> None:
        """End requests without a token for this gateway, because no worker is alive. Others may listen to them."""
        for cursor in self.cursors.values():
            if not cursor.ended and not cursor.next:
                self._end(cursor, outcome)
        self.wake()

    def close(self, outcome: ClosedOutcome) -> None:
        """End the stream for its client. The requests have not ended."""
        for cursor in self.cursors.values():
            self._end(cursor, outcome)
        self.wake()

    def wake(self) -> None:
        """Make `ready` return."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _add(self, cursor: Cursor, item: StepItem) -> None:
        before = cursor.next
        if (new := cursor.take(item)) is not None:
            self._waiting.append(new)
            cursor.generation = self._generation
            # This runs for every token; `weight` is called only for log-probabilities.
            is_scored = new.report is not None or (new.deltas and new.deltas[0].logprobs)
            self._waiting_tokens += weight(new) if is_scored else cursor.next - before

    # --- consumer -----------------------------------------------------------------------------------------------------

    async def next(self) -> list[StepItem]:
        """Wait for items and take them. Returns an empty list when a keepalive is due."""
        while self._has_rest or not (self._waiting or self.keepalive_due):
            await self.ready()
        return self.take()

    def take(self) -> list[StepItem]:
        """Drain the buffer; return the items in order per request, at most about MAX_TAKEN tokens."""
        self.keepalive_due = False
        self._taken_at = self._loop.time()
        items, self._waiting = self._waiting, []
        if self._waiting_tokens > MAX_TAKEN:
            items, self._waiting = cut(items, MAX_TAKEN)
            self._has_rest = bool(self._waiting)
        self._waiting_tokens = sum(map(weight, self._waiting)) if self._waiting else 0
        # While more than MAX_TAKEN is left, the generation stays, so that no request adds a second item.
        self._generation += self._waiting_tokens <= MAX_TAKEN
        self.came_at, self._fed_at = self._fed_at, 0.0
        return items

    async def ready(self) -> None:
        """Wait until items are buffered, a keepalive is due, or `wake` is called. Reads logs where necessary."""
        self._is_woken = False
        if self._has_rest:
            self._has_rest = False
            await asyncio.sleep(0)
        if self._must_read and not self._waiting and not self._is_woken:
            await self._read_logs()
            check_cancelled()
        # `wake` may have been called meanwhile, for example at the end of the call.
        if self._is_woken or self._waiting or self.keepalive_due:
            return
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _read_logs(self) -> None:
        """End overdue requests, then read the logs of requests that are behind or silent, while there is room."""
        self._must_read = False
        if self._loop.time() >= self.overdue_at:
            self.overdue_at = math.inf
            for cursor in self.cursors.values():
                if not cursor.ended:
                    await self._expire(cursor)
        for cursor in self.cursors.values():
            while (cursor.behind or cursor in self._silent) and not cursor.ended and self._waiting_tokens < MAX_WAITING:
                silent = cursor in self._silent
                self._silent.discard(cursor)
                before, cursor.behind = cursor.next, False
                if not await self._read_log(cursor):
                    cursor.behind = True  # Redis does not answer: the next keepalive or silence tries again
                    break
                if cursor.ended or cursor.next > before:
                    self._stats.repairs += not cursor.expects_log
                    cursor.expects_log = cursor.expects_log and cursor.behind
                    continue
                cursor.expects_log = False
                if silent:
                    cursor.wait_longer()
                    await self._check_exists(cursor)
                break
            if cursor.ended:
                self._silent.discard(cursor)
            self._must_read = self._must_read or cursor.behind or cursor in self._silent

    async def _expire(self, cursor: Cursor) -> None:
        """End a request in Redis whose deadline has passed without a worker that ended it; its log has the end."""
        try:
            reply = await self._broker.expire(cursor.request_id)
        except (RedisError, OSError):
            # The client need not wait for Redis. The request is ended there once Redis answers.
            if not cursor.ended:
                self.to_expire.append(cursor.request_id)
            self._end(cursor, Outcome(OutcomeName.DEADLINE, "the deadline passed, and no worker took notice"))
            return
        if reply is ExpireReply.EARLY:
            self.overdue_at = self._loop.time() + OVERDUE_S
            self._check_at(self, self.overdue_at)
        else:
            cursor.behind = cursor.expects_log = True
            self._silent.add(cursor)

    async def _read_log(self, cursor: Cursor) -> bool:
        """Add one page of the log after the cursor, or as much as fits. Returns False if Redis did not answer."""
        self._stats.log_reads += 1
        try:
            # With many choices an entry has many tokens. The first entry may be the one that ends at the cursor.
            count = max(3, min(PAGE, 2 * MAX_WAITING // self._tokens_per_entry))
            items = await self._broker.read_output(cursor.request_id, cursor.next, count)
        except (RedisError, OSError) as error:
            log.debug(
                "the output log of request %s cannot be read now: %s",
                cursor.request_id,
                error,
                extra={"request_id": cursor.request_id},
            )
            return False
        except (MessageError, KeyError) as error:
            self._stats.note_corrupt_log(cursor.request_id, error)
            detail = "the output log of the request is corrupt; send the request again"
            self._end(cursor, Outcome(OutcomeName.ERROR, detail))
            return True
        for item in items:
            if self._waiting_tokens >= MAX_WAITING:
                cursor.behind = True
                break
            self._add(cursor, item)
        if items:
            self._tokens_per_entry = max(1, weight(items[-1]), weight(items[0]))
        if len(items) >= count - 1:
            cursor.behind = True
        return True

    async def _check_exists(self, cursor: Cursor) -> None:
        """End a request for this gateway that no worker will finish: Redis has lost it or its log, or it is parked."""
        try:
            value = await self._broker.client.hget(self._broker.keys.request(cursor.request_id), "state")
        except (RedisError, OSError):
            return
        state = None if value is None else text(value)
        if state in (RequestState.DONE, RequestState.PARKED) and not await self._read_log(cursor):
            return
        if state == RequestState.PARKED and not cursor.ended and not cursor.behind:
            cursor.ended = True
            self.is_responsible = False  # the end of this stream cancels no other request of the call
            self._waiting.append(StepItem(cursor.request_id, cursor.next, (), ParkedOutcome(Parked.code)))
            return
        if state in (None, RequestState.DONE) and not cursor.ended and not cursor.behind:
            detail = "the request was lost together with the data of Redis; send it again"
            self._end(cursor, Outcome(OutcomeName.ERROR, detail))

    def _end(self, cursor: Cursor, outcome: Outcome) -> None:
        if cursor.ended:  # the end of the request was published while Redis was asked
            return
        cursor.ended = True
        self._given_up.add(cursor.request_id)
        self._waiting.append(StepItem(cursor.request_id, cursor.next, (), outcome))
