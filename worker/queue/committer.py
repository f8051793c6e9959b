"""Commits the results of steps to Redis, on the event loop: one `commit_step` at a time, in order, until it succeeds.

Steps that finish during a commit are merged into the next one: a slow Redis costs latency, never order. The reply of a
commit names requests that were cancelled, have expired or were lost; the engine learns of them before its next step.

No client reads the output of a batch line before its end. The tokens of such requests are held for up to HOLD_S, so
that a batch costs Redis and the gateways a few commits per second. A worker that dies loses the tokens that it holds.
The next attempt computes the same tokens again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from redis.exceptions import RedisError

from quire.shared.process.backoff import Backoff
from quire.shared.protocol.broker import Broker, Claim, ComputedTokens, PackedStep, StepCommit, StepReply
from quire.shared.protocol.messages import StepItem, decode_items
from quire.shared.protocol.states import COMPLETE, OutcomeName
from quire.worker.queue.counts import CommitCounts
from quire.worker.queue.estimates import EstimateErrors, Started
from quire.worker.queue.executor import Executor

log = logging.getLogger(__name__)

# Backoff of a failed commit. Nothing is lost meanwhile: uncommitted tokens wait in the committer.
RETRY_S = (0.1, 2.0)
# Largest number of results in a commit of several steps: Redis serves no other client during the script. An embedding
# counts as one more for each RESULT_BYTES, about the size of a result.
MAX_COMMITS = 20_000
RESULT_BYTES = 64
# Largest number of tokens in a merged item: appending to a tuple costs time in proportion to its length.
MAX_JOINED = 256
# Longest time for which tokens of an unwatched request are held: less than the silence after which a gateway asks Redis
# whether the output log of a request has more (SILENCE_S).
HOLD_S = 0.2
# Shortest time from the beginning of a commit to one without results, which only asks for cancellations.
ASK_S = 0.02
# Largest number of remembered cancellations that arrived before the replies to their claims.
MAX_EARLY_CANCELS = 1024


# Ends of an attempt whose request has not ended: another attempt owns it, or the worker gave it back to the queue.
LOST, RELEASED = "lost", "released"


class AttemptTrace(Protocol):
    """The trace of one attempt. `attempt_spans.AttemptSpans` is one."""

    def first_tokens(self) -> None:
        """Note that the attempt has emitted tokens."""
        ...

    def end(self, outcome: str, tokens: int) -> None:
        """End the trace. outcome: that of the request, or LOST or RELEASED. tokens: those in the request's log."""
        ...


@dataclass(slots=True)
class Attempt:
    """A request that this worker runs: its fencing token, and a copy of its log in case Redis loses the end of it.

    The log is kept as the bytes that Redis stores: as objects, the tokens of long requests would make the garbage
    collector pause for longer than a step.
    """

    token: str
    log: bytearray
    spans: AttemptTrace | None = None
    is_unwatched: bool = False
    started: Started | None = None

    def sent(self) -> list[StepItem]:
        """Return all items of the log, which may be longer than the limit of a frame."""
        return list(decode_items(bytes(self.log), limit=len(self.log)))

    def trace_end(self, outcome: str) -> None:
        """End the spans of the attempt."""
        if self.spans is not None:
            sent = self.sent()
            self.spans.end(outcome, sent[-1].end if sent else 0)


class Committer:
    """Owns the attempts at this worker's running requests. `on_lost` is called when one of them is lost."""

    def __init__(self, broker: Broker, worker_id: str, on_lost: Callable[[], None]) -> None:
        self._broker = broker
        self._worker_id = worker_id
        self._on_lost = on_lost
        self._attempts: dict[str, Attempt] = {}
        self._steps: list[list[StepCommit]] = []
        # Results of unwatched requests, by request id, that wait to be due.
        self._held: dict[str, list[StepCommit]] = {}
        self._held_since = 0.0
        # Tokens computed since the last commit for requests that emit nothing before their end, by request id.
        self._computed: dict[str, ComputedTokens] = {}
        self._commit_began_at = 0.0
        self._early_cancels: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._stopping = False
        # Traced attempts without a token yet.
        self._first_awaited: dict[str, Attempt] = {}
        # Requests without a committed token of their present attempt. Any of them may be what kills workers.
        self._without_progress: set[str] = set()
        # Notices of the last reply; the next commit acknowledges them.
        self._applied: tuple[tuple[str, str], ...] = ()
        self.counts = CommitCounts()
        self.errors = EstimateErrors()

    def register(
        self,
        claim: Claim,
        logged: Iterable[bytes],
        spans: AttemptTrace | None = None,
        started: Started | None = None,
    ) -> bool:
        """Commit items of this request from now on, under the claim's attempt token and after its `logged` items.

        started: of a request with one sequence that begins with its first token.
        Returns False if the request has been cancelled since the claim: it must be ended as soon as it has started.
        """
        attempt = Attempt(claim.attempt, bytearray().join(logged), spans, claim.is_unwatched, started)
        self._attempts[claim.request_id] = attempt
        self._without_progress.add(claim.request_id)
        if spans is not None:
            self._first_awaited[claim.request_id] = attempt
        self._ended.clear()
        return self._early_cancels.pop(claim.request_id, 0) == 0

    def runs(self, request_id: str) -> bool:
        """Return whether this worker has an attempt at the request."""
        return request_id in self._attempts

    @property
    def num_without_progress(self) -> int:
        """Requests, running or isolated, without a committed token of their present attempts."""
        return len(self._without_progress)

    def lacks_progress(self, claim: Claim) -> bool:
        """Return whether the claim's attempt is still the present one and has no committed token."""
        return claim.request_id in self._without_progress and self._token(claim.request_id) == claim.attempt

    @property
    def num_running(self) -> int:
        return len(self._attempts)

    @property
    def num_uncommitted(self) -> int:
        """Requests with tokens that wait for the next commit. Tokens that are held are not due yet."""
        return len({commit.item.request_id for step in self._steps for commit in step})

    @property
    def attempts(self) -> list[tuple[str, str]]:
        """The requests that run here, each with its attempt token."""
        return [(request_id, attempt.token) for request_id, attempt in self._attempts.items()]

    def lose(self, lost: Iterable[tuple[str, str]], engine: Executor) -> None:
        """Drop attempts that another worker or an outcome has superseded."""
        for request_id, token in lost:
            if self._token(request_id) == token:
                self._lose(request_id, engine)

    def put(self, commits: list[StepCommit], computed: Iterable[ComputedTokens] = ()) -> None:
        """Queue the results of a step. Call it on the event loop."""
        for tokens in computed:
            self._computed[tokens.request_id] = tokens
        if commits and self._first_awaited:
            self._trace_first(commits)
        now = time.monotonic()
        commits = self._hold(commits, now)
        if self._held and now - self._held_since >= HOLD_S:
            commits += self._take_held()
        if commits:
            self._steps.append(commits)
        if commits or now - self._commit_began_at >= ASK_S:
            self._wake.set()

    def _hold(self, commits: list[StepCommit], now: float) -> list[StepCommit]:
        """Hold the results of unwatched requests. Returns the others, and those of unwatched requests that end."""
        due: list[StepCommit] = []
        for commit in commits:
            request_id, outcome = commit.item.request_id, commit.item.outcome
            attempt = self._attempts.get(request_id)
            if attempt is None or not attempt.is_unwatched:
                due.append(commit)
            elif outcome is not None:
                due += merge([*self._held.pop(request_id, ()), commit])
            else:
                if not self._held:
                    self._held_since = now
                self._held.setdefault(request_id, []).append(commit)
        return due

    def _take_held(self) -> list[StepCommit]:
        """Take the results that are held, merged to one item per request."""
        held, self._held = self._held, {}
        return [commit for commits in held.values() for commit in merge(commits)]

    def _trace_first(self, commits: list[StepCommit]) -> None:
        for token, item in commits:
            attempt = self._first_awaited.get(item.request_id)
            if attempt is not None and attempt.token == token and attempt.spans is not None and item.deltas:
                attempt.spans.first_tokens()
                del self._first_awaited[item.request_id]

    async def run(self, engine: Executor) -> None:
        """Commit until `stop`, and then the steps that are still queued."""
        while not self._stopping or self._steps or self._held:
            await self._wake.wait()
            self._wake.clear()
            if self._stopping and self._held:
                self._steps.append(self._take_held())
            # Without results there is a commit, too: the reply may cancel a request whose prompt is being computed.
            commits = self._gather()
            behind = self._apply(await self._commit(commits), commits, engine)
            if again := self._resend(behind, engine):
                # A log that is still behind after that would not accept the items the next time either.
                for request_id in self._apply(await self._commit(again, is_new=False), again, engine):
                    self._lose(request_id, engine)

    async def all_ended(self) -> None:
        """Wait until this worker has no attempts."""
        await self._ended.wait()

    def released(self, attempts: Iterable[tuple[str, str]]) -> None:
        """Forget attempts whose requests have been returned to the queue."""
        for request_id, token in list(attempts):
            if self._token(request_id) == token:
                self._forget(request_id).trace_end(RELEASED)

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _gather(self) -> list[StepCommit]:
        """Take queued steps, merged to one item per request, without the items of attempts that are over."""
        count = size = 0
        while count < len(self._steps):
            size += _size(self._steps[count])
            if count and size > MAX_COMMITS:
                break
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
        """Commit until Redis answers. is_new: append the items to the logs of the attempts first."""
        self._commit_began_at = time.monotonic()
        step = PackedStep(commits)
        computed, self._computed = tuple(self._computed.values()), {}
        if is_new:
            for commit, item in zip(commits, step.items, strict=True):
                self._attempts[commit[1][0]].log.extend(item)
        backoff = Backoff(*RETRY_S)
        while True:
            try:
                with self.counts.timed(commits):
                    reply = await self._broker.commit_step(self._worker_id, step, self._applied, computed)
                self._applied = reply.notices
                return reply
            except (RedisError, OSError) as error:
                if self._stopping:
                    raise
                # Redis may have run the script or not; it is repeatable.
                delay = backoff.next()
                log.warning("commit of %d requests failed (%s); retrying in %.1f s", len(commits), error, delay)
                await asyncio.sleep(delay)

    def _apply(self, reply: StepReply, commits: list[StepCommit], engine: Executor) -> dict[str, int]:
        """Apply a reply. Returns the requests whose logs in Redis lack items, and where these logs end."""
        self.counts.fenced += len(reply.lost)
        self.lose(reply.lost, engine)
        if self._without_progress:
            self._without_progress.difference_update(
                item.request_id
                for attempt, item in commits
                if item.end > item.start
                and item.request_id not in reply.behind
                and self._token(item.request_id) == attempt
            )
        for commit in commits:
            item = commit.item
            if item.outcome and item.request_id not in reply.behind and self._token(item.request_id) == commit.attempt:
                attempt = self._forget(item.request_id)
                attempt.trace_end(item.outcome.name)
                if attempt.started is not None and item.outcome.name in COMPLETE:
                    self.errors.note(attempt.started, item.end, engine.status.pace)
                self.counts.ended[item.outcome.name] += 1
        for request_id in reply.cancelled:
            if request_id in self._attempts:
                engine.finish(request_id, OutcomeName.CANCELLED)
            else:  # before the reply to its claim; or after its end, and then the entry is evicted unused
                if len(self._early_cancels) >= MAX_EARLY_CANCELS:
                    del self._early_cancels[next(iter(self._early_cancels))]
                self._early_cancels[request_id] = None
        for request_id in reply.expired:
            if request_id in self._attempts:
                engine.finish(request_id, OutcomeName.DEADLINE)
        return {request_id: index for request_id, index in reply.behind.items() if request_id in self._attempts}

    def _resend(self, behind: dict[str, int], engine: Executor) -> list[StepCommit]:
        """Return the items that logs in Redis lack, with their old boundaries: readers may have seen some of them."""
        again = []
        for request_id, index in behind.items():
            attempt = self._attempts[request_id]
            rest = [item for item in attempt.sent() if item.end > index or item.outcome]
            if rest and rest[0].start == index:
                log.warning(
                    "the log of request %s in Redis ends at token %d; sending the rest again",
                    request_id,
                    index,
                    extra={"request_id": request_id},
                )
                self.counts.resent += 1
                again += [StepCommit(attempt.token, item) for item in rest]
            else:
                self._lose(request_id, engine)
        return again

    def _lose(self, request_id: str, engine: Executor) -> None:
        attempt = self._forget(request_id)
        log.warning(
            "attempt at request %s is lost: it ended or is parked, or another worker has claimed it",
            request_id,
            extra={"request_id": request_id},
        )
        attempt.trace_end(LOST)
        engine.drop(request_id, attempt.token)
        self._on_lost()

    def _forget(self, request_id: str) -> Attempt:
        self._first_awaited.pop(request_id, None)
        self._without_progress.discard(request_id)
        self._held.pop(request_id, None)
        attempt = self._attempts.pop(request_id)
        if not self._attempts:
            self._ended.set()
        return attempt

    def _token(self, request_id: str) -> str | None:
        attempt = self._attempts.get(request_id)
        return attempt.token if attempt else None


def _size(step: list[StepCommit]) -> int:
    """Return the results of a step, and the size of its embeddings in results."""
    ends = (item.outcome for _, item in step if item.outcome is not None and item.outcome.embedding is not None)
    return len(step) + sum(len(end.embedding or b"") // RESULT_BYTES for end in ends)


def merge(commits: list[StepCommit]) -> list[StepCommit]:
    """Merge the commits of consecutive steps to one per request, where the order of its tokens allows it.

    Tokens are numbered over all choices, in the same order in every attempt, so requests with several choices are not
    merged.
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
    """Return two commits merged, or None if they cannot be. A worker that lags behind calls this for every token."""
    attempt, item = before
    if attempt != after.attempt:
        return None
    if item.deltas and after.item.deltas and len(item.deltas[0].token_ids) >= MAX_JOINED:
        return None
    joined = item.joined(after.item)
    return None if joined is None else StepCommit(attempt, joined)
