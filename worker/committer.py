"""Makes steps durable and visible, off the engine thread: one `commit_step` at a time, in order, until it succeeds.

While a commit is under way further steps gather, and go out merged in the next one: a slow Redis costs latency, never
order. What a commit tells about requests (cancelled, expired, lost) goes back to the engine before its next step.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from redis.exceptions import RedisError

from shared.broker import Broker, Claim, StepCommit, StepReply
from shared.messages import Delta, StepItem
from worker.engine_loop import EngineLoop

log = logging.getLogger(__name__)

# Between tries of a failed commit. Nothing is lost meanwhile: the engine's tokens wait here.
RETRY_S = 0.1
RETRY_LIMIT_S = 2.0


@dataclass(slots=True)
class Attempt:
    """A request that this worker runs: its fencing token, and all items of its log, for a Redis that lost the tail."""

    token: str
    sent: list[StepItem]


class Committer:
    """Owns the attempts of this worker's running requests."""

    def __init__(self, broker: Broker, worker_id: str) -> None:
        self._broker = broker
        self._worker_id = worker_id
        self._attempts: dict[str, Attempt] = {}
        self._pending: dict[str, list[StepItem]] = {}
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._stopping = False

    def register(self, claim: Claim) -> None:
        """From now on items of this request are committed under the claim's attempt token."""
        self._attempts[claim.request_id] = Attempt(claim.attempt, list(claim.items))
        self._ended.clear()

    def runs(self, request_id: str) -> bool:
        """Whether this worker is at work on a request."""
        return request_id in self._attempts

    @property
    def num_running(self) -> int:
        return len(self._attempts)

    def put(self, items: list[StepItem]) -> None:
        """Take the items of a step. Call it on the event loop."""
        for item in items:
            if item.request_id in self._attempts:
                self._pending.setdefault(item.request_id, []).append(item)
        self._wake.set()

    async def run(self, engine: EngineLoop) -> None:
        """Commit until `stop`, then what is left."""
        while not self._stopping or self._pending:
            await self._wake.wait()
            self._wake.clear()
            # A step without results is committed too: its reply brings the cancel of a prompt that is still being
            # computed.
            pending, self._pending = self._pending, {}
            items = [merge(items) for items in pending.values()]
            for item in items:
                self._attempts[item.request_id].sent.append(item)
            items = self._obey(await self._commit(items), items, engine)
            while items:
                items = self._obey(await self._commit(items), items, engine)
            if not self._attempts:
                self._ended.set()

    async def all_ended(self) -> None:
        """Wait until no request runs here."""
        await self._ended.wait()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def _commit(self, items: list[StepItem]) -> StepReply:
        delay = RETRY_S
        commits = [StepCommit(self._attempts[item.request_id].token, item) for item in items]
        while True:
            try:
                return await self._broker.commit_step(self._worker_id, commits)
            except (RedisError, OSError) as error:
                if self._stopping:
                    raise
                # The effect is unknown, and the script is repeatable.
                log.warning("commit of %d requests failed (%s); again in %.1f s", len(commits), error, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_LIMIT_S)

    def _obey(self, reply: StepReply, items: list[StepItem], engine: EngineLoop) -> list[StepItem]:
        """Act on a reply; returns the items that must be sent again because the log is behind them."""
        again = []
        for request_id, index in reply.behind.items():
            if attempt := self._attempts.get(request_id):
                log.warning("the log of request %s ends at token %d; sending the rest again", request_id, index)
                again.append(merge([item for item in attempt.sent if item.end > index or item.outcome]))
        for item in items:
            if item.outcome and item.request_id not in reply.behind:
                self._attempts.pop(item.request_id, None)
        for request_id in reply.lost:
            if self._attempts.pop(request_id, None):
                log.warning("request %s belongs to another attempt now; dropped", request_id)
                self._pending.pop(request_id, None)
                engine.drop(request_id)
        for request_id in reply.cancelled:
            if request_id in self._attempts:
                engine.finish(request_id, "cancelled")
        for request_id in reply.expired:
            if request_id in self._attempts:
                engine.finish(request_id, "deadline")
        return [item for item in again if item.request_id in self._attempts]


def merge(items: list[StepItem]) -> StepItem:
    """Consecutive items of one request as one item."""
    if len(items) == 1:
        return items[0]
    by_choice: dict[int, Delta] = {}
    for delta in (delta for item in items for delta in item.deltas):
        before = by_choice.get(delta.choice)
        tokens = before.token_ids + delta.token_ids if before else delta.token_ids
        by_choice[delta.choice] = Delta(delta.choice, tokens, delta.finish_reason, delta.matched_stop)
    deltas = tuple(by_choice[choice] for choice in sorted(by_choice))
    return StepItem(items[0].request_id, items[0].start, deltas, items[-1].outcome)
