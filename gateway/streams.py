"""The outputs of requests as their clients get them: every token once, in order, whatever pub/sub lost or doubled.

    published items:   [0, 3) [3, 5)        [7, 9)  [7, 9)
    cursor:                   next = 5  ->  gap: the log has [5, 7)   ->  next = 9: a duplicate

Live items are a hint, the output log is the truth: what does not fit is read from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from gateway.cancellation import check_cancelled
from shared.broker import Broker
from shared.messages import Delta, MessageError, Outcome, StepItem

log = logging.getLogger("gateway")

# Items of one call that may wait for its client. A client that is slower gets the rest from the log.
MAX_WAITING = 256
# A request that was silent for so long is compared with its log; a fruitless look doubles the time up to the maximum.
SILENCE_S = 0.25
MAX_SILENCE_S = 4.0
# A request that has not ended so long after its deadline has no worker that would end it.
OVERDUE_S = 1.0
# Entries of the log that are read at once.
PAGE = 256


class Cursor:
    """How far the client of one request is, in tokens. Decides which part of an item is new."""

    __slots__ = ("behind", "ended", "heard_at", "is_logged", "next", "patience_s", "request_id")

    def __init__(self, request_id: str, now: float) -> None:
        self.request_id = request_id
        self.next = 0
        self.behind = False
        # Whether it is behind for another reason than that messages were lost.
        self.is_logged = False
        self.ended = False
        self.heard_at = now
        self.patience_s = SILENCE_S

    def take(self, item: StepItem) -> StepItem | None:
        """The new part of an item. None if there is none, or if tokens before it are missing: `behind` is then set."""
        if self.ended:
            return None
        start, end = item.start, item.end
        if start > self.next:
            self.behind = True
            return None
        if item.outcome is None and end <= self.next:
            return None
        if start < self.next:
            item = _without_first(item, self.next - start)
        self.next = max(self.next, end)
        self.ended = item.outcome is not None
        return item


def split(item: StepItem, at: int) -> tuple[StepItem, ...]:
    """The item in two where token `at` is inside it."""
    if not item.start < at < item.end:
        return (item,)
    deltas: list[Delta] = []
    count = at - item.start
    for delta in item.deltas:
        if count < len(delta.token_ids):
            if count:
                deltas.append(Delta(delta.choice, delta.token_ids[:count]))
            break
        deltas.append(delta)
        count -= len(delta.token_ids)
    return StepItem(item.request_id, item.start, tuple(deltas)), _without_first(item, at - item.start)


def _without_first(item: StepItem, count: int) -> StepItem:
    """The item less its first `count` tokens; finish reasons stay."""
    deltas: list[Delta] = []
    start = item.start + count
    for delta in item.deltas:
        dropped = min(count, len(delta.token_ids))
        count -= dropped
        rest = delta.token_ids[dropped:]
        if rest or delta.finish_reason is not None:
            deltas.append(delta._replace(token_ids=rest))
    return StepItem(item.request_id, start, tuple(deltas), item.outcome)


class Outputs:
    """What the requests of one call emit, for one consumer."""

    def __init__(self, fanout: Fanout, broker: Broker, request_ids: Sequence[str], keepalive_s: float) -> None:
        self._fanout = fanout
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self.cursors = {request_id: Cursor(request_id, now) for request_id in request_ids}
        self._waiting: deque[StepItem] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._keepalive_s = keepalive_s
        self._gave_at = now
        self._keepalive_due = False
        self._silent: set[Cursor] = set()
        # Whether some cursor is behind or silent, so that the log must be read.
        self._doubt = False
        # From here on the requests are in Redis; one that is not found there later is lost.
        self.accepted = False
        # Whether they end when nobody listens any more.
        self.is_responsible = False
        # When the first of what waits came from a worker, and the first of what `next` returned last; 0 for the log.
        self._fed_at = 0.0
        self.came_at = 0.0
        # Requests that this side gave up; they may run on. The late ones have outlived their deadlines.
        self._given_up: set[str] = set()
        self.late: list[str] = []
        # When the requests must have ended by themselves, on the loop's clock.
        self.overdue_at = math.inf

    @property
    def unfinished(self) -> list[str]:
        """Requests that may run, as far as is known."""
        return [
            cursor.request_id
            for cursor in self.cursors.values()
            if not cursor.ended or cursor.request_id in self._given_up
        ]

    # --- the side of the subscription: never blocks -------------------------------------------------------------------

    def feed(self, item: StepItem, now: float) -> None:
        """One item that was published."""
        cursor = self.cursors[item.request_id]
        cursor.heard_at = now
        cursor.patience_s = SILENCE_S
        if len(self._waiting) >= MAX_WAITING:
            cursor.behind = cursor.is_logged = True
        elif (new := cursor.take(item)) is not None:
            if not self._waiting:
                self._fed_at = self._fanout.frame_at
            self._waiting.append(new)
        self._doubt = self._doubt or cursor.behind
        self._wake()

    def accept(self, left_s: float | None, *, is_logged: bool) -> None:
        """The requests are in Redis. `left_s`: until their deadline; `is_logged`: there may be output already."""
        self.accepted = True
        if left_s is not None:
            self.overdue_at = self._loop.time() + left_s + OVERDUE_S
        if is_logged:
            self.suspect()
            for cursor in self.cursors.values():
                cursor.is_logged = cursor.behind

    def suspect(self) -> None:
        """Messages may have been lost: compare everything with the log."""
        for cursor in self.cursors.values():
            cursor.behind = not cursor.ended
        self._doubt = True
        self._wake()

    def tick(self, now: float) -> None:
        """Called a few times per second: notices silence, towards Redis and towards the client."""
        if self.accepted:
            for cursor in self.cursors.values():
                if not cursor.ended and now - cursor.heard_at >= cursor.patience_s:
                    cursor.heard_at = now
                    self._silent.add(cursor)
                    self._doubt = True
            self._doubt = self._doubt or now >= self.overdue_at
        self._keepalive_due = now - self._gave_at >= self._keepalive_s
        if self._silent or self._keepalive_due or self._waiting or now >= self.overdue_at:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the side of the client ---------------------------------------------------------------------------------------

    async def next(self) -> list[StepItem]:
        """All items that wait, in order per request; an empty list when it is time for a sign of life."""
        while True:
            if self._doubt and not self._waiting:
                await self._look_into_log()
                check_cancelled()
            if self._waiting or self._keepalive_due:
                self._keepalive_due = False
                self._gave_at = self._loop.time()
                items = list(self._waiting)
                self._waiting.clear()
                self.came_at, self._fed_at = self._fed_at, 0.0
                return items
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def _look_into_log(self) -> None:
        self._doubt = False
        if self._loop.time() >= self.overdue_at:
            self.overdue_at = math.inf
            for cursor in self.cursors.values():
                if not cursor.ended:
                    await self._expire(cursor)
        for cursor in self.cursors.values():
            while (cursor.behind or cursor in self._silent) and not cursor.ended and len(self._waiting) < MAX_WAITING:
                silent = cursor in self._silent
                self._silent.discard(cursor)
                before, cursor.behind = cursor.next, False
                if not await self._read_log(cursor):
                    cursor.behind = True  # Redis is away: the next sign of life, or silence, makes us look again
                    break
                if cursor.ended or cursor.next > before:
                    self._fanout.repairs += not cursor.is_logged
                    cursor.is_logged = cursor.is_logged and cursor.behind
                    continue
                cursor.is_logged = False
                if silent:
                    cursor.patience_s = min(2 * cursor.patience_s, MAX_SILENCE_S)
                    await self._check_alive(cursor)
                break
            if cursor.ended:
                self._silent.discard(cursor)
            self._doubt = self._doubt or cursor.behind or cursor in self._silent

    async def _expire(self, cursor: Cursor) -> None:
        """Have a request ended that has outlived its deadline: no worker was there to do it. Its end is in the log."""
        try:
            found = await self._broker.expire(cursor.request_id)
        except (RedisError, OSError):
            # The client need not wait for Redis; the request is ended once that answers.
            self.late.append(cursor.request_id)
            self._end(cursor, Outcome("deadline", "the deadline passed, and no worker took notice"))
            return
        if found == "early":
            self.overdue_at = self._loop.time() + OVERDUE_S
        else:
            cursor.behind = cursor.is_logged = True
            self._silent.add(cursor)

    async def _read_log(self, cursor: Cursor) -> bool:
        """Take one page of what the log has after the cursor; False if Redis did not answer."""
        self._fanout.log_reads += 1
        try:
            items = await self._broker.read_output(cursor.request_id, cursor.next, PAGE)
        except (RedisError, OSError) as error:
            log.debug(
                "the output of request %s cannot be read now: %s",
                cursor.request_id,
                error,
                extra={"request_id": cursor.request_id},
            )
            return False
        except (MessageError, KeyError) as error:
            self._fanout.note_corrupt_log(cursor.request_id, error)
            self._end(cursor, Outcome("error", "the output log of the request is corrupt; send the request again"))
            return True
        for item in items:
            if (new := cursor.take(item)) is not None:
                self._waiting.append(new)
        if len(items) >= PAGE - 1:  # one may have been the entry at the cursor itself
            cursor.behind = True
        return True

    async def _check_alive(self, cursor: Cursor) -> None:
        """End a request that Redis has no memory of, or of its output: no worker will ever do it."""
        try:
            state = await self._broker.client.hget(self._broker.keys.request(cursor.request_id), "state")
        except (RedisError, OSError):
            return
        if state == b"done" and not await self._read_log(cursor):
            return
        if state in (None, b"done") and not cursor.ended and not cursor.behind:
            detail = "the request was lost together with the data of Redis; send it again"
            self._end(cursor, Outcome("error", detail))

    def _end(self, cursor: Cursor, outcome: Outcome) -> None:
        cursor.ended = True
        self._given_up.add(cursor.request_id)
        self._waiting.append(StepItem(cursor.request_id, cursor.next, (), outcome))


class Fanout:
    """Which calls listen to which request: usually one, more where clients came back or share a request."""

    def __init__(self, broker: Broker, keepalive_s: float) -> None:
        self._broker = broker
        self._keepalive_s = keepalive_s
        self._by_request: dict[str, list[Outputs]] = {}
        self._open: set[Outputs] = set()
        self.corrupt_logs = 0
        self.log_reads = 0
        # How often the log had what was published and did not arrive.
        self.repairs = 0
        # When the latest frame came, by time.perf_counter.
        self.frame_at = 0.0

    def open(self, request_ids: Sequence[str]) -> Outputs:
        outputs = Outputs(self, self._broker, request_ids, self._keepalive_s)
        self._open.add(outputs)
        for request_id in request_ids:
            self._by_request.setdefault(request_id, []).append(outputs)
        return outputs

    def close(self, outputs: Outputs) -> None:
        if outputs not in self._open:
            return
        self._open.remove(outputs)
        for request_id in outputs.cursors:
            listeners = self._by_request[request_id]
            listeners.remove(outputs)
            if not listeners:
                del self._by_request[request_id]

    def has(self, request_id: str) -> bool:
        """Whether some call listens to the request."""
        return request_id in self._by_request

    def feed(self, items: Sequence[StepItem], now: float) -> None:
        find = self._by_request.get
        self.frame_at = time.perf_counter()
        for item in items:
            # Without any its client has gone, or the gateway was started anew.
            for outputs in find(item.request_id, ()):
                outputs.feed(item, now)

    def note_corrupt_log(self, request_id: str, error: Exception) -> None:
        """The output log of a request cannot be read; its calls end with an error."""
        self.corrupt_logs += 1
        if self.corrupt_logs == 1:
            log.error(
                "the output log of request %s is corrupt (this is said once): %s",
                request_id,
                error,
                extra={"request_id": request_id},
            )

    def each(self, act: Callable[[Outputs], None]) -> None:
        for outputs in list(self._open):
            act(outputs)

    @property
    def calls(self) -> int:
        return len(self._open)
