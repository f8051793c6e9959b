"""The outputs of one call's requests as its client gets them: every token once, in order, whatever pub/sub lost or
doubled.

Live items are a hint, the output log is the truth: what does not fit is read from there. So is what a slow client has
no room for: no more than MAX_WAITING tokens wait here, the item with which they became so many, and one item of each
other request of the call, for those come together; or MAX_TAKEN that are left of these, and again one item of each. A
log-probability counts as a token, since it takes as much room where it is written.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from quire.gateway.stream.cancellation import check_cancelled
from quire.gateway.stream.cursor import SILENCE_S, Cursor, cut, weight
from quire.shared.broker import Broker
from quire.shared.messages import MessageError, Outcome, StepItem
from quire.shared.states import ExpireReply, OutcomeName

if TYPE_CHECKING:
    from quire.gateway.stream.router import FrameRouter

log = logging.getLogger("gateway")

# Tokens of one call that may wait for its client. A client that is slower gets the rest from the log.
MAX_WAITING = 256
# Of what came together, such as an answer that was ranked at its end: what is taken before others get their turn.
MAX_TAKEN = 1024
# A request that has not ended so long after its deadline has no worker that would end it.
OVERDUE_S = 1.0
# Entries of the log that are read at once, at most.
PAGE = 128


class OutputBuffer:
    """What the requests of one call emit, for one consumer.

    A consumer waits for it (`next`), or has a `sink` that is called as soon as there is something, and takes it
    without any task being woken for it.
    """

    def __init__(self, fanout: FrameRouter, broker: Broker, request_ids: Sequence[str], keepalive_s: float) -> None:
        self._fanout = fanout
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self.cursors = {request_id: Cursor(request_id, now) for request_id in request_ids}
        self._waiting: list[StepItem] = []
        self._waiting_tokens = 0
        # The number of what waits now: how often what waited was taken, but for a little.
        self._portion = 0
        # Whether others get their turn before the rest of a large portion is taken.
        self._is_rest = False
        # Of the entries of the log that were read last; log-probabilities count as they do where they wait.
        self._tokens_per_entry = 1
        self._waiter: asyncio.Future[None] | None = None
        # Whether `wake` was called while others had their turn, or the log was read.
        self._is_woken = False
        # Takes what waits; False where the consumer's task has something to do.
        self.sink: Callable[[], bool] | None = None
        self._keepalive_s = keepalive_s
        self._gave_at = now
        self.keepalive_due = False
        self._silent: set[Cursor] = set()
        # Whether some cursor is behind or silent, so that the log must be read.
        self._doubt = False
        # From here on the requests are in Redis; one that is not found there later is lost.
        self.accepted = False
        # Whether they end when nobody listens any more.
        self.is_responsible = False
        # When the first of what waits came from a worker, and the first of what was taken last; 0 for the log.
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
        """One item that was published. `flush` follows when there are no more at the moment."""
        cursor = self.cursors[item.request_id]
        cursor.heard_at = now
        if cursor.patience_s > SILENCE_S:
            cursor.patience_s = SILENCE_S
            self._fanout.watch.add(self, now + SILENCE_S)
        if self._waiting_tokens >= MAX_WAITING and cursor.portion == self._portion:
            cursor.behind = cursor.is_logged = True
        else:
            if not self._waiting:
                self._fed_at = self._fanout.frame_at
            self._take(cursor, item)
        if cursor.behind:
            self._doubt = True

    def flush(self) -> None:
        """What was fed goes to the client."""
        if self.sink is None or not self.sink() or self._doubt or self._waiting:
            self.wake()

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
        self.wake()

    def check(self, now: float) -> float:
        """Notice silence, towards Redis and towards the client; when to be called again, on the loop's clock."""
        due = self._gave_at + self._keepalive_s
        if now >= due:
            self.keepalive_due = True
            self.wake()
            due = now + self._keepalive_s
        if not self.accepted:
            return min(due, now + SILENCE_S)
        for cursor in self.cursors.values():
            if cursor.ended:
                continue
            if now - cursor.heard_at >= cursor.patience_s:
                cursor.heard_at = now
                if cursor.behind:
                    self.look(cursor)
                else:
                    self._fanout.watch.ask(self, cursor)
            due = min(due, cursor.heard_at + cursor.patience_s)
        if now < self.overdue_at:
            return min(due, self.overdue_at)
        self._doubt = True
        self.wake()
        return min(due, now + SILENCE_S)

    def look(self, cursor: Cursor) -> None:
        """A silent request is to be compared with its log."""
        self._silent.add(cursor)
        self._doubt = True
        self.wake()

    def wake(self) -> None:
        """Have `ready` return."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, cursor: Cursor, item: StepItem) -> None:
        before = cursor.next
        if (new := cursor.take(item)) is not None:
            self._waiting.append(new)
            cursor.portion = self._portion
            # This runs for every token: without log-probabilities it costs no call.
            is_scored = new.deltas and new.deltas[0].logprobs
            self._waiting_tokens += weight(new) if is_scored else cursor.next - before

    # --- the side of the client ---------------------------------------------------------------------------------------

    async def next(self) -> list[StepItem]:
        """What waits, in order per request; an empty list when it is time for a sign of life."""
        while self._is_rest or not (self._waiting or self.keepalive_due):
            await self.ready()
        return self.take()

    def take(self) -> list[StepItem]:
        """All items that wait now, in order per request, or the first of very much."""
        self.keepalive_due = False
        self._gave_at = self._loop.time()
        items, self._waiting = self._waiting, []
        if self._waiting_tokens > MAX_TAKEN:
            items, self._waiting = cut(items, MAX_TAKEN)
            self._is_rest = bool(self._waiting)
        self._waiting_tokens = sum(map(weight, self._waiting)) if self._waiting else 0
        # While more is left than is taken at once, none of the requests adds to it.
        self._portion += self._waiting_tokens <= MAX_TAKEN
        self.came_at, self._fed_at = self._fed_at, 0.0
        return items

    async def ready(self) -> None:
        """Wait until something may have to be done: items wait, it is time for a sign of life, or `wake` was called.

        What is in doubt is read from the log.
        """
        self._is_woken = False
        if self._is_rest:
            self._is_rest = False
            await asyncio.sleep(0)
        if self._doubt and not self._waiting and not self._is_woken:
            await self._look_into_log()
            check_cancelled()
        # Woken: meanwhile something happened for which nobody waited, such as the end.
        if self._is_woken or self._waiting or self.keepalive_due:
            return
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
            while (cursor.behind or cursor in self._silent) and not cursor.ended and self._waiting_tokens < MAX_WAITING:
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
                    cursor.wait_longer()
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
            if not cursor.ended:
                self.late.append(cursor.request_id)
            self._end(cursor, Outcome(OutcomeName.DEADLINE, "the deadline passed, and no worker took notice"))
            return
        if found is ExpireReply.EARLY:
            self.overdue_at = self._loop.time() + OVERDUE_S
            self._fanout.watch.add(self, self.overdue_at)
        else:
            cursor.behind = cursor.is_logged = True
            self._silent.add(cursor)

    async def _read_log(self, cursor: Cursor) -> bool:
        """Take one page of what the log has after the cursor, or as much as there is room for; False if Redis did not
        answer."""
        self._fanout.log_reads += 1
        try:
            # Each entry of a call with many choices has many tokens; one may be the entry at the cursor itself.
            count = max(3, min(PAGE, 2 * MAX_WAITING // self._tokens_per_entry))
            items = await self._broker.read_output(cursor.request_id, cursor.next, count)
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
            if self._waiting_tokens >= MAX_WAITING:
                cursor.behind = True
                break
            self._take(cursor, item)
        if items:
            self._tokens_per_entry = max(1, weight(items[-1]), weight(items[0]))
        if len(items) >= count - 1:
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
            self._end(cursor, Outcome(OutcomeName.ERROR, detail))

    def _end(self, cursor: Cursor, outcome: Outcome) -> None:
        if cursor.ended:  # while Redis was asked
            return
        cursor.ended = True
        self._given_up.add(cursor.request_id)
        self._waiting.append(StepItem(cursor.request_id, cursor.next, (), outcome))
