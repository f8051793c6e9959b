"""Makes steps durable and visible, off the engine thread: one `commit_step` at a time, in order, until it succeeds.

While a commit is under way further steps gather, and go out merged in the next one: a slow Redis costs latency, never
order. What a commit tells about requests (cancelled, expired, lost) goes back to the engine before its next step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from redis.exceptions import RedisError

from quire.shared.broker import Broker, Claim, PackedStep, StepCommit, StepReply
from quire.shared.messages import Delta, StepItem, decode_items
from quire.worker.inspect.tracing import AttemptSpans
from quire.worker.queue.counts import CommitCounts
from quire.worker.queue.engine_thread import EngineThread

log = logging.getLogger(__name__)

# Between tries of a failed commit. Nothing is lost meanwhile: the engine's tokens wait here.
RETRY_S = 0.1
RETRY_LIMIT_S = 2.0
# Results in one commit, beyond the first of the steps that gathered: Redis serves nobody else meanwhile.
MAX_COMMITS = 20_000
# Tokens that are joined to one item: of longer ones each token more would cost as much as all before it.
MAX_JOINED = 256
# Cancellations that may come before the reply of the claim does.
MAX_EARLY_CANCELS = 1024


@dataclass(slots=True)
class Attempt:
    """A request that this worker runs: its fencing token, and its log, for a Redis that lost the tail.

    The log is bytes, as Redis has it: as objects, the tokens of long requests are what the garbage collector would stop
    for, for longer than a step.
    """

    token: str
    log: bytearray
    spans: AttemptSpans | None = None

    def sent(self) -> list[StepItem]:
        """All items of the log, which may be longer than any frame."""
        return list(decode_items(bytes(self.log), limit=len(self.log)))

    def trace_end(self, outcome: str) -> None:
        """The attempt is over."""
        if self.spans is not None:
            sent = self.sent()
            self.spans.end(outcome, sent[-1].end if sent else 0)


class Committer:
    """Owns the attempts of this worker's running requests. `on_lost` is called when one of them is over unfinished."""

    def __init__(self, broker: Broker, worker_id: str, on_lost: Callable[[], None]) -> None:
        self._broker = broker
        self._worker_id = worker_id
        self._on_lost = on_lost
        self._attempts: dict[str, Attempt] = {}
        self._steps: list[list[StepCommit]] = []
        self._early_cancels: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._stopping = False
        # Attempts that are traced and have no token yet.
        self._first_awaited: dict[str, Attempt] = {}
        # Requests without a committed token of this attempt: if this process dies, it may be because of one of them.
        self._unproven: set[str] = set()
        # What the last reply had from the mailbox: the next commit says that it was obeyed.
        self._obeyed: tuple[tuple[str, str], ...] = ()
        self.counts = CommitCounts()

    def register(self, claim: Claim, logged: Iterable[bytes], spans: AttemptSpans | None = None) -> bool:
        """From now on items of this request are committed under the claim's attempt token, behind what is `logged`.

        False if it was cancelled since: it must be ended as soon as it is started.
        """
        attempt = Attempt(claim.attempt, bytearray().join(logged), spans)
        self._attempts[claim.request_id] = attempt
        self._unproven.add(claim.request_id)
        if spans is not None:
            self._first_awaited[claim.request_id] = attempt
        self._ended.clear()
        return self._early_cancels.pop(claim.request_id, 0) == 0

    def runs(self, request_id: str) -> bool:
        """Whether this worker is at work on a request."""
        return request_id in self._attempts

    @property
    def num_unproven(self) -> int:
        """Requests that run here or wait to run alone, and have made no progress under their present attempts."""
        return len(self._unproven)

    def is_unproven(self, claim: Claim) -> bool:
        """Whether this very attempt is here and has made no progress."""
        return claim.request_id in self._unproven and self._token(claim.request_id) == claim.attempt

    @property
    def num_running(self) -> int:
        return len(self._attempts)

    @property
    def num_uncommitted(self) -> int:
        """Requests with tokens that wait for the next commit."""
        return len({commit.item.request_id for step in self._steps for commit in step})

    @property
    def attempts(self) -> list[tuple[str, str]]:
        """The requests that run here, each with its attempt token."""
        return [(request_id, attempt.token) for request_id, attempt in self._attempts.items()]

    def lose(self, lost: Iterable[tuple[str, str]], engine: EngineThread) -> None:
        """Let go of attempts that are over."""
        for request_id, token in lost:
            if self._token(request_id) == token:
                self._lose(request_id, engine)

    def put(self, commits: list[StepCommit]) -> None:
        """Take the results of a step. Call it on the event loop."""
        if commits:
            self._steps.append(commits)
            if self._first_awaited:
                self._trace_first(commits)
        self._wake.set()

    def _trace_first(self, commits: list[StepCommit]) -> None:
        for token, item in commits:
            attempt = self._first_awaited.get(item.request_id)
            if attempt is not None and attempt.token == token and attempt.spans is not None and item.deltas:
                attempt.spans.first_tokens()
                del self._first_awaited[item.request_id]

    async def run(self, engine: EngineThread) -> None:
        """Commit until `stop`, then what is left."""
        while not self._stopping or self._steps:
            await self._wake.wait()
            self._wake.clear()
            # A step without results is committed too: its reply brings the cancel of a prompt that is still being
            # computed.
            commits = self._gather()
            behind = self._obey(await self._commit(commits), commits, engine)
            if again := self._resend(behind, engine):
                # What is still behind after that will not be mended by sending it once more.
                for request_id in self._obey(await self._commit(again, is_new=False), again, engine):
                    self._lose(request_id, engine)

    async def all_ended(self) -> None:
        """Wait until no request runs here."""
        await self._ended.wait()

    def released(self, attempts: Iterable[tuple[str, str]]) -> None:
        """These have been handed back."""
        for request_id, token in list(attempts):
            if self._token(request_id) == token:
                self._forget(request_id).trace_end("released")

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _gather(self) -> list[StepCommit]:
        """What is to be committed: one item for each request. What belongs to attempts that are over falls away."""
        count = size = 0
        while count < len(self._steps) and (not count or size + len(self._steps[count]) <= MAX_COMMITS):
            size += len(self._steps[count])
            count += 1
        steps, self._steps = self._steps[:count], self._steps[count:]
        if self._steps:
            self._wake.set()
        find = self._attempts.get
        commits = [
            commit
            for step in steps
            for commit in step
            if (attempt := find(commit[1][0])) is not None and attempt.token == commit[0]
        ]
        return commits if len(steps) < 2 else merge(commits)

    async def _commit(self, commits: list[StepCommit], is_new: bool = True) -> StepReply:
        """is_new: not yet in the logs of the attempts."""
        step = PackedStep(commits)
        if is_new:
            for commit, item in zip(commits, step.items, strict=True):
                self._attempts[commit[1][0]].log.extend(item)
        delay = RETRY_S
        while True:
            try:
                with self.counts.timed(commits):
                    reply = await self._broker.commit_step(self._worker_id, step, self._obeyed)
                self._obeyed = reply.notices
                return reply
            except (RedisError, OSError) as error:
                if self._stopping:
                    raise
                # The effect is unknown, and the script is repeatable.
                log.warning("commit of %d requests failed (%s); again in %.1f s", len(commits), error, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_LIMIT_S)

    def _obey(self, reply: StepReply, commits: list[StepCommit], engine: EngineThread) -> dict[str, int]:
        """Act on a reply; returns the requests whose log is behind what was sent, and where it ends."""
        self.counts.fenced += len(reply.lost)
        self.lose(reply.lost, engine)
        if self._unproven:
            self._unproven.difference_update(
                item.request_id
                for attempt, item in commits
                if item.end > item.start
                and item.request_id not in reply.behind
                and self._token(item.request_id) == attempt
            )
        for commit in commits:
            item = commit.item
            if item.outcome and item.request_id not in reply.behind and self._token(item.request_id) == commit.attempt:
                self._forget(item.request_id).trace_end(item.outcome.name)
                self.counts.ended[item.outcome.name] += 1
        for request_id in reply.cancelled:
            if request_id in self._attempts:
                engine.finish(request_id, "cancelled")
            else:  # before its claim's reply, or after its end: then it is never asked for, and gives way
                if len(self._early_cancels) >= MAX_EARLY_CANCELS:
                    del self._early_cancels[next(iter(self._early_cancels))]
                self._early_cancels[request_id] = None
        for request_id in reply.expired:
            if request_id in self._attempts:
                engine.finish(request_id, "deadline")
        return {request_id: index for request_id, index in reply.behind.items() if request_id in self._attempts}

    def _resend(self, behind: dict[str, int], engine: EngineThread) -> list[StepCommit]:
        """The items that logs lack, cut as they were cut before: readers may have seen some of them."""
        again = []
        for request_id, index in behind.items():
            attempt = self._attempts[request_id]
            rest = [item for item in attempt.sent() if item.end > index or item.outcome]
            if rest and rest[0].start == index:
                log.warning(
                    "the log of request %s ends at token %d; sending the rest again",
                    request_id,
                    index,
                    extra={"request_id": request_id},
                )
                self.counts.resent += 1
                again += [StepCommit(attempt.token, item) for item in rest]
            else:
                self._lose(request_id, engine)
        return again

    def _lose(self, request_id: str, engine: EngineThread) -> None:
        attempt = self._forget(request_id)
        log.warning(
            "attempt at request %s is over: Redis or another worker has it otherwise",
            request_id,
            extra={"request_id": request_id},
        )
        attempt.trace_end("lost")
        engine.drop(request_id, attempt.token)
        self._on_lost()

    def _forget(self, request_id: str) -> Attempt:
        self._first_awaited.pop(request_id, None)
        self._unproven.discard(request_id)
        attempt = self._attempts.pop(request_id)
        if not self._attempts:
            self._ended.set()
        return attempt

    def _token(self, request_id: str) -> str | None:
        attempt = self._attempts.get(request_id)
        return attempt.token if attempt else None


def merge(commits: list[StepCommit]) -> list[StepCommit]:
    """Commits of consecutive steps as one for each request, as far as the order of its tokens allows.

    That is counted over all choices, and the same in every attempt: so requests with several choices stay as they are.
    """
    merged: list[StepCommit] = []
    newest: dict[str, int] = {}
    for commit in commits:
        request_id = commit[1][0]
        at = newest.get(request_id)
        if at is not None and (joined := _joined(merged[at], commit)) is not None:
            merged[at] = joined
        else:
            newest[request_id] = len(merged)
            merged.append(commit)
    return merged


def _joined(before: StepCommit, after: StepCommit) -> StepCommit | None:
    """Both as one; None if they stay two. A worker that is behind does this for every token."""
    attempt, (request_id, start, old, _) = before
    other, (_, _, new, outcome) = after
    if attempt != other or len(old) > 1 or len(new) > 1:
        return None
    if old and new:
        choice, token_ids, _, _, _, records = old[0]
        other_choice, more, reason, stop, score, more_records = new[0]
        if choice != other_choice or len(token_ids) >= MAX_JOINED:
            return None
        if more_records:
            records = (records or b"") + more_records
        new = (Delta(choice, token_ids + more, reason, stop, score, records),)
    return StepCommit(attempt, StepItem(request_id, start, new or old, outcome))
