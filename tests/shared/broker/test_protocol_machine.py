"""The scripts against the model in protocol_model.py: random walks of gateways, workers and faults, always checked.

A walk never sleeps: instead of waiting for a lease to run out it makes entries old, and it sets deadlines back. For a
lost reply it makes a call twice and ignores the first answer.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count, product
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from quire.shared.protocol.broker import (
    Admission,
    Claim,
    ComputedTokens,
    IdempotencyConflict,
    NoRoom,
    QueueBounds,
    QueueFull,
    StepCommit,
    StepReply,
    StreamEntry,
    Submitted,
)
from quire.shared.protocol.broker.parking import NO_BOUNDS
from quire.shared.protocol.keys import PRIORITY_CLASSES, QUEUES, RETENTION_S, WAITING_QUEUES
from quire.shared.protocol.messages import OUTCOMES, Delta, Outcome, StepItem, decode_items
from tests.support.fair_model import Group, Share
from tests.support.protocol_driver import (
    API_KEYS,
    KEYS,
    SHARES,
    TENANTS,
    FairSnapshot,
    Lane,
    Patch,
    Saved,
    Snapshot,
    finished,
)
from tests.support.protocol_model import AHEAD, NONE, PASSED, ProtocolModel, Request
from tests.support.redis_server import RedisServer

BOUNDS = QueueBounds(requests=5, tokens=100, stored_bytes=15_000, key_bytes=9000)
GATEWAYS = ("g0", "g1")
LEASE_MS = 30_000
# Retention of stored responses.
STORED_S = 7200

worker_names = st.sampled_from(("w0", "w1", "w2"))
gateways = st.sampled_from(GATEWAYS)
# An index into a list of the model's objects, taken modulo the length of the list.
picks = st.integers(0, 63)
shares = st.sampled_from(SHARES)
# Sequences of a request that run at once.
widths = st.sampled_from((1, 1, 1, 2, 4))
# True if the reply of a call is lost, so that the caller repeats the call.
losses = st.sampled_from((False, False, True))
classes = st.sampled_from(PRIORITY_CLASSES)
# The part of a step for one request: which request; how many tokens; the error of their start; the outcome.
SIZES = range(4)
SHIFTS = (0, 0, 0, 0, 0, -2, -1, 1)
ENDINGS = (None, None, None, None, "stop", "length")
sizes = st.sampled_from(SIZES)
endings = st.sampled_from(ENDINGS)
counts = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12)), max_size=2)
moves = st.sampled_from(tuple(product(range(8), SIZES, SHIFTS, ENDINGS)))  # one draw is faster than four draws
# Idempotency keys and fingerprints.
calls = st.sampled_from((("", ""), ("", ""), ("k0", "f0"), ("k0", "f1"), ("k1", "f0")))


@dataclass
class Handed:
    """A delivery that a worker holds; `attempt` once it has tried to claim it."""

    delivery: StreamEntry
    attempt: str = ""


@dataclass
class Attempt:
    """A request that a worker computes, or believes to compute."""

    request_id: str
    token: str
    position: int
    ending: str | None = None


@dataclass
class Worker:
    name: str
    lives: int = 0
    handed: list[Handed] = field(default_factory=list)
    held: list[Attempt] = field(default_factory=list)
    ghosts: list[Attempt] = field(default_factory=list)  # attempts of earlier lives, whose calls may still arrive
    waiting: list[Claim] = field(default_factory=list)  # to run alone
    obeyed: tuple[tuple[str, str], ...] = ()  # notices of the last reply

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self.lives}"


def token(request_id: str, index: int) -> int:
    """Return the token that every worker computes at this position."""
    return (31 * int(request_id[1:]) + index) % 1000


@lru_cache(maxsize=4096)
def decoded(data: bytes) -> tuple[StepItem, ...]:
    return tuple(decode_items(data))


class ProtocolMachine(RuleBasedStateMachine):
    server: ClassVar[RedisServer]
    patch: ClassVar[Patch] = ()
    walks: ClassVar[list[int]]  # the number of steps of each walk

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane(self.server, GATEWAYS, self.patch)
        self.model = ProtocolModel()
        self.workers = {name: Worker(name) for name in ("w0", "w1", "w2")}
        self.readers = {name: self.lane.reader(name) for name in self.workers}
        self.new_ids = map(str, count())
        self.settled: dict[str, int] = {}  # finished and checked requests: the length of the log
        # What a gateway has of each request that was ever published.
        self.seen: defaultdict[str, int] = defaultdict(int)
        self.ends_seen: Counter[str] = Counter()
        self.remembered: tuple[Saved, tuple[ProtocolModel, dict[str, int], Counter[str]]] | None = None
        self.walks.append(0)

    # --- calling ------------------------------------------------------------------------------------------------------

    def call(self, real: Callable[[], Any], model: Callable[[], Any], lost: bool = False) -> Any:
        """Call the broker and the model, twice if `lost`. Check that the answers agree, and return the last one."""
        for _ in range(1 + lost):
            expected = model()
            try:
                got = finished(real())
            except QueueFull as full:
                got = ("full", full.requests, full.tokens)
            except NoRoom as error:
                got = ("no_room", error.key, error.held)
            except IdempotencyConflict:
                got = "conflict"
            if isinstance(got, StepReply):
                got, expected = _unordered(got), _unordered(expected)
            elif isinstance(got, Submitted):
                got = got.id
            elif isinstance(got, Claim):
                got = replace(got, waited_ms=0)
            for request, worker in self.model.unplaced:
                entry = self.lane.client.hget(KEYS.request(request.request_id), "entry")
                assert isinstance(entry, bytes)
                self.model.place(request, entry.decode(), worker)
            if isinstance(expected, list) and all(isinstance(one, StreamEntry) for one in expected):
                expected = [
                    one if one.entry_id else replace(one, entry_id=self.model.requests[one.request_id].entry)
                    for one in expected
                ]
            assert got == expected
            self.model.unplaced.clear()
        # What went for others.
        self.settled = {name: length for name, length in self.settled.items() if name in self.model.requests}
        return got

    def pick(self, index: int) -> Request:
        requests = list(self.model.requests.values())
        return requests[-1 - index % len(requests)]

    def has_requests(self) -> bool:
        return bool(self.model.requests)

    # --- gateways -----------------------------------------------------------------------------------------------------

    @rule(priority_class=classes, gateway=gateways, share=shares, rows=widths)
    def submit_plainly(self, priority_class: str, gateway: str, share: Share, rows: int) -> None:
        self.submit(priority_class, 10, gateway, AHEAD, False, ("", ""), False, share=share, rows=rows)

    @rule(priority_class=classes, order=st.lists(st.tuples(shares, widths), min_size=2, max_size=4))
    def crowd(self, priority_class: str, order: list[tuple[Share, int]]) -> None:
        """Several tenants and users come at once, so that some of them wait in lines."""
        for share, rows in order:
            self.submit(priority_class, 6, "g0", AHEAD, False, ("", ""), False, share=share, rows=rows)

    @rule(
        priority_class=classes,
        cost=st.integers(1, 60),
        gateway=gateways,
        deadline=st.sampled_from((NONE, AHEAD)),
        is_background=st.booleans(),
        call=calls,
        lost=losses,
        other=st.none() | picks,
        retention_s=st.sampled_from((0, 0, STORED_S)),
        share=shares,
        counts_stored=st.booleans(),
        rows=widths,
        api_key=st.sampled_from(API_KEYS),
    )
    def submit(
        self,
        priority_class: str,
        cost: int,
        gateway: str,
        deadline: int,
        is_background: bool,
        call: tuple[str, str],
        lost: bool,
        other: int | None = None,
        retention_s: int = 0,
        share: Share = SHARES[0],
        counts_stored: bool = True,
        rows: int = 1,
        api_key: str = "",
    ) -> None:
        key, fingerprint = call
        beside = "" if other is None or not self.has_requests() else self.pick(other).request_id
        request = Request(f"r{next(self.new_ids)}", priority_class, cost, gateway, is_background, deadline)
        request.retention_s, request.is_stored = retention_s, retention_s > 0
        request.share, request.prompt_tokens = share, cost // 2
        request.counts_stored, request.rows, request.key = counts_stored, rows, api_key
        self.call(
            lambda: self.lane.broker.submit(
                request.request_id,
                request.body,
                Admission(
                    gateway=gateway,
                    cost=cost,
                    bounds=BOUNDS,
                    priority_class=priority_class,
                    deadline_ms=3_600_000 if deadline == AHEAD else 0,
                    metadata=request.metadata,
                    is_background=is_background,
                    idempotency_key=key,
                    fingerprint=fingerprint,
                    traceparent=request.traceparent,
                    beside=beside,
                    retention_s=retention_s,
                    conversation=request.conversation,
                    prompt_tokens=request.prompt_tokens,
                    **share._asdict(),
                    counts_stored=counts_stored,
                    rows=rows,
                    owner=api_key,
                ),
            ),
            lambda: self.model.submit(request, BOUNDS, key, fingerprint, beside),
            lost,
        )
        if request.request_id in self.model.requests:
            self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, gateway=gateways, lost=losses)
    def submit_what_is_there(self, which: int, gateway: str, lost: bool) -> None:
        """Submit a known request again, as the gateway of a second call with the same idempotency key does."""
        known = self.pick(which)
        again = replace(known, gateway=gateway)
        self.call(
            lambda: self.lane.broker.submit(
                known.request_id, known.body, Admission(gateway=gateway, cost=known.cost, bounds=BOUNDS)
            ),
            lambda: self.model.submit(again, BOUNDS, "", ""),
            lost,
        )
        self.check_listeners(known)

    @precondition(has_requests)
    @rule(which=picks, beside=st.sampled_from((None, None, (), ("g0",), GATEWAYS)), lost=losses)
    def cancel(self, which: int, beside: tuple[str, ...] | None, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(
            lambda: self.lane.broker.cancel(request_id, beside), lambda: self.model.cancel(request_id, beside), lost
        )

    @precondition(has_requests)
    @rule(which=picks, lost=losses)
    def delete(self, which: int, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(lambda: self.lane.broker.delete(request_id), lambda: self.model.delete(request_id), lost)

    @precondition(has_requests)
    @rule(which=picks, lost=losses)
    def expire(self, which: int, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(lambda: self.lane.broker.expire(request_id), lambda: self.model.expire(request_id), lost)

    @precondition(has_requests)
    @rule(which=picks, gateway=gateways, lost=losses)
    def attach(self, which: int, gateway: str, lost: bool) -> None:
        request = self.pick(which)
        request_id = request.request_id
        self.call(
            lambda: self.lane.broker.attach(request_id, gateway),
            lambda: self.model.attach(request_id, gateway),
            lost,
        )
        self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, gateway=gateways, lost=losses)
    def detach(self, which: int, gateway: str, lost: bool) -> None:
        request = self.pick(which)
        request_id = request.request_id
        self.call(
            lambda: self.lane.broker.detach(request_id, gateway),
            lambda: self.model.detach(request_id, gateway),
            lost,
        )
        self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, most=st.sampled_from(((0, 0), (0, 0), (1, 0), (0, 1))), lost=losses)
    def park(self, which: int, most: tuple[int, int], lost: bool) -> None:
        request = self.pick(which)
        request_id = request.request_id
        park = partial(self.lane.broker.park, request_id, retention_s=STORED_S, bounds=BOUNDS)
        self.call(
            lambda: park(max_parked=most[0], max_parked_of_key=most[1]),
            lambda: self.model.park(request_id, "", *most, BOUNDS),
            lost,
        )
        self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, lost=losses)
    def unpark(self, which: int, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(
            lambda: self.lane.broker.unpark(request_id, BOUNDS),
            lambda: self.model.unpark(request_id, BOUNDS, STORED_S),
            lost,
        )

    @precondition(has_requests)
    @rule(which=picks)
    def parking_lapses(self, which: int) -> None:
        """The time for which a request may be parked is over."""
        request = self.pick(which)
        if request.state == "parked":
            request.has_lapsed = True
            self.lane.client.zadd(KEYS.parked, {request.request_id: 1})

    def check_listeners(self, request: Request) -> None:
        listeners = {} if request.is_background else {request.request_id: request.listeners}
        assert finished(self.lane.broker.listeners_of([request.request_id, "nobody"])) == listeners

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(name=worker_names, rows=st.integers(1, 3), first=picks, widest=st.sampled_from((0, 1, 4)))
    def read(self, name: str, rows: int, first: int, widest: int = 0) -> None:
        """Read new requests, the classes in any order. widest: 0 for no more rows than `rows`."""
        start = first % len(QUEUES)
        queues = QUEUES[start:] + QUEUES[:start]
        reader, widest = self.readers[name], widest or rows
        self.take(
            name,
            self.call(
                lambda: reader.read(rows, 0, queues, widest), lambda: self.model.read(name, rows, queues, widest)
            ),
        )
        assert reader.too_wide == self.model.too_wide

    @rule(name=worker_names)
    def look_back(self, name: str) -> None:
        """After a failed read: read the entries that are pending for this worker."""
        worker = self.workers[name]
        pending = self.call(self.pending_of(name), lambda: self.model.read_pending(name))
        held = {attempt.request_id for attempt in worker.held}
        self.take(name, [delivery for delivery in pending if delivery.request_id not in held])

    @rule(name=worker_names)
    def restart(self, name: str) -> None:
        worker = self.workers[name]
        worker.ghosts = (worker.ghosts + worker.held)[-4:]
        worker.handed, worker.held, worker.obeyed = [], [], ()
        worker.lives += 1
        self.take(name, self.call(self.pending_of(name), lambda: self.model.read_pending(name)))

    @rule(name=worker_names, rows=st.integers(1, 3))
    def reclaim(self, name: str, rows: int) -> None:
        self.take(
            name,
            self.call(lambda: self.lane.broker.reclaim(name, LEASE_MS, rows), lambda: self.model.reclaim(name, rows)),
        )

    def take(self, name: str, deliveries: list[StreamEntry]) -> None:
        worker = self.workers[name]
        known = {(handed.delivery.queue, handed.delivery.entry_id) for handed in worker.handed}
        worker.handed += [
            Handed(delivery) for delivery in deliveries if (delivery.queue, delivery.entry_id) not in known
        ]

    def pending_of(self, name: str) -> Callable[[], Any]:
        return self.readers[name].pending

    @rule(name=worker_names, which=picks, lost=losses, repeats=losses)
    def claim(self, name: str, which: int, lost: bool, repeats: bool) -> None:
        """Claim. repeats: the worker does not get the reply, and repeats the call later, after any other actions."""
        worker = self.workers[name]
        if not worker.handed:
            return
        handed = worker.handed.pop(which % len(worker.handed))
        handed.attempt = handed.attempt or f"attempt-{next(self.new_ids)}"
        claim = self.call(
            lambda: self.lane.broker.claim(handed.delivery, name, handed.attempt, worker.incarnation),
            lambda: self.model.claim(handed.delivery, name, handed.attempt, worker.incarnation),
            lost,
        )
        if repeats:
            worker.handed.append(handed)
        elif claim is not None:
            worker.held.append(Attempt(claim.request_id, claim.attempt, claim.emitted))
            # A request that must run alone begins later, or never.
            if claim.runs_alone and which % 2 == 0:
                self.begin(claim, lost)
            elif claim.runs_alone:
                worker.waiting.append(claim)

    @precondition(lambda machine: any(worker.waiting for worker in machine.workers.values()))
    @rule(name=worker_names, which=picks, lost=losses)
    def begin_late(self, name: str, which: int, lost: bool) -> None:
        """Begin an attempt that waited to run alone, after any other actions."""
        waiting = self.workers[name].waiting
        if waiting:
            self.begin(waiting.pop(which % len(waiting)), lost)

    def begin(self, claim: Claim, lost: bool) -> None:
        self.call(
            lambda: self.lane.broker.begin(claim),
            lambda: self.model.begin(claim.request_id, claim.attempt),
            lost,
        )

    @rule(name=worker_names, moves=st.lists(moves, max_size=3), lost=losses, counts=counts)
    def commit(
        self, name: str, moves: list[tuple[int, int, int, str | None]], lost: bool, counts: list[tuple[int, int]]
    ) -> None:
        """Commit a step of requests that this worker, or one of its earlier lives, computes.

        counts: tokens that were computed for some of them so far.
        """
        worker = self.workers[name]
        attempts = worker.held + worker.ghosts
        if not attempts:
            return
        computed = [(attempts[which % len(attempts)], count) for which, count in counts]
        self.commit_step(
            worker,
            [(attempts[which % len(attempts)], *rest) for which, *rest in moves],
            lost,
            [ComputedTokens(attempt.request_id, attempt.token, count) for attempt, count in computed],
        )

    @rule(name=worker_names, which=picks, size=st.integers(1, 3), counted=st.integers(1, 12), lost=losses)
    def rank(self, name: str, which: int, size: int, counted: int, lost: bool) -> None:
        """A request with ranked choices ends: its tokens were counted before, and come all at once."""
        worker = self.workers[name]
        attempts = [attempt for attempt in worker.held if attempt.position == 0]
        if attempts:
            attempt = attempts[which % len(attempts)]
            computed = ComputedTokens(attempt.request_id, attempt.token, counted)
            self.commit_step(worker, [], lost, [computed])
            self.commit_step(worker, [(attempt, size, 0, "stop")], lost)

    @rule(name=worker_names, which=picks, size=sizes, ending=endings, lost=losses)
    def serve(self, name: str, which: int, size: int, ending: str | None, lost: bool) -> None:
        """Let a worker read, claim, and commit a step of all its requests, of which one may end."""
        worker = self.workers[name]
        self.read(name, 2, 0)
        self.claim_all(worker)
        self.commit_step(
            worker,
            [(attempt, size, 0, ending if index == which % 4 else None) for index, attempt in enumerate(worker.held)],
            lost,
        )

    @rule(name=worker_names, dead=worker_names)
    def take_over(self, name: str, dead: str) -> None:
        """A worker is silent for long. Another worker takes its requests, or the same worker does after a restart."""
        self.lease_runs_out(dead)
        if name == dead:
            self.restart(dead)
        self.reclaim(name, 3)
        self.claim_all(self.workers[name])

    @rule(name=worker_names, other=worker_names)
    def claim_late(self, name: str, other: str) -> None:
        """A worker reads an entry and stalls until another worker has taken over the entry. Then it tries to claim."""
        self.read(name, 2, 0)
        self.lease_runs_out(name)
        self.reclaim(other, 3)
        self.claim_all(self.workers[name])

    def claim_all(self, worker: Worker) -> None:
        for _ in range(len(worker.handed)):
            self.claim(worker.name, 0, False, False)

    def commit_step(
        self, worker: Worker, parts: list[tuple[Any, ...]], lost: bool, computed: Sequence[ComputedTokens] = ()
    ) -> None:
        commits, ends = [], []
        for attempt, size, shift, ending in parts:
            start = max(0, attempt.position + shift)
            ending = ending and (attempt.ending or ending)
            tokens = tuple(token(attempt.request_id, start + index) for index in range(size))
            item = StepItem(attempt.request_id, start, (Delta(0, tokens),), Outcome(ending) if ending else None)
            commits.append(StepCommit(attempt.token, item))
            if shift == 0:
                ends.append((attempt, item))
        reply = self.call(
            lambda: self.lane.broker.commit_step(worker.name, commits, worker.obeyed, computed),
            lambda: self.model.commit_step(worker.name, commits, worker.obeyed, computed),
            lost,
        )
        worker.obeyed = reply.notices
        for attempt, item in ends:
            attempt.position = item.end
        over = {(attempt.request_id, attempt.token) for attempt, item in ends if item.outcome} | set(reply.lost)
        for attempt in worker.held:
            if attempt.request_id in reply.behind:
                attempt.position = reply.behind[attempt.request_id]
                over.discard((attempt.request_id, attempt.token))
            if attempt.request_id in reply.cancelled:
                attempt.ending = "cancelled"
            elif attempt.request_id in reply.expired:
                attempt.ending = "deadline"
        worker.held = [attempt for attempt in worker.held if (attempt.request_id, attempt.token) not in over]

    @rule(name=worker_names, lost=losses)
    def renew(self, name: str, lost: bool) -> None:
        worker = self.workers[name]
        attempts = [(attempt.request_id, attempt.token) for attempt in worker.held]
        over = self.call(lambda: self.lane.broker.renew(name, attempts), lambda: self.model.renew(name, attempts), lost)
        worker.held = [attempt for attempt in worker.held if (attempt.request_id, attempt.token) not in over]

    @rule(name=worker_names, which=picks, lost=losses)
    def park_own(self, name: str, which: int, lost: bool) -> None:
        """A worker that ends parks an attempt, its own or that of an earlier life."""
        worker = self.workers[name]
        attempts = worker.held + worker.ghosts
        if attempts:
            attempt = attempts[which % len(attempts)]
            self.call(
                lambda: self.lane.broker.park(attempt.request_id, retention_s=STORED_S, attempt=attempt.token),
                lambda: self.model.park(attempt.request_id, attempt.token),
                lost,
            )

    @rule(name=worker_names, which=picks, lost=losses)
    def release(self, name: str, which: int, lost: bool) -> None:
        """Release some of the requests. An earlier life of the worker may try to release them too."""
        worker = self.workers[name]
        attempts = [(attempt.request_id, attempt.token) for attempt in worker.held[which % 3 :] + worker.ghosts[:1]]
        self.call(lambda: self.lane.broker.release(attempts), lambda: self.model.release(attempts), lost)
        worker.ghosts = (worker.ghosts + worker.held[which % 3 :])[-4:]
        del worker.held[which % 3 :]

    # --- what happens by itself ---------------------------------------------------------------------------------------

    @rule(name=worker_names)
    def lease_runs_out(self, name: str) -> None:
        for (queue, entry), pending in self.model.pending.items():
            if pending.worker == name:
                pending.is_old = True
                self.lane.age(name, queue, entry, 2 * LEASE_MS)

    @precondition(has_requests)
    @rule(which=picks)
    def deadline_passes(self, which: int) -> None:
        request = self.pick(which)
        if request.deadline == AHEAD and request.state != "parked":
            request.deadline = PASSED
            self.lane.client.hset(KEYS.request(request.request_id), "deadline", 1)

    @precondition(has_requests)
    @rule(which=picks, kept=sizes)
    def lose_tail(self, which: int, kept: int) -> None:
        """Redis comes back without the last entries of a log."""
        request = self.pick(which)
        if request.state == "running":
            self.model.cut_log(request, kept)
            self.lane.cut_log(request.request_id, request.log, request.emitted)

    @rule()
    def remember(self) -> None:
        """Save the state of Redis, as on its disk."""
        self.remembered = self.lane.save(), deepcopy((self.model, self.settled, self.ends_seen))

    @precondition(lambda machine: machine.remembered is not None)
    @rule()
    def come_back_older(self) -> None:
        """Restore an older state of Redis. Workers and clients keep their newer state."""
        assert self.remembered is not None
        saved, state = self.remembered
        self.lane.restore(saved)
        self.model, self.settled, self.ends_seen = deepcopy(state)

    @precondition(has_requests)
    @rule(which=picks, key=st.sampled_from(("", "k0", "k1")))
    def forget(self, which: int, key: str) -> None:
        """The retention time of a finished request, or of an idempotency key, is over."""
        request = self.pick(which)
        if key:
            self.model.keys.pop(key, None)
            self.lane.client.delete(KEYS.idempotency(key))
        elif request.state == "done":
            self.model.forget(request)
            self.settled.pop(request.request_id, None)
            keys = (KEYS.request, KEYS.output, KEYS.conversation)
            self.lane.client.delete(*(key(request.request_id) for key in keys))
            self.lane.client.zadd(KEYS.due, {request.request_id: 1}, xx=True)

    @precondition(has_requests)
    @rule(which=picks)
    def end_is_long_ago(self, which: int) -> None:
        """A request that stays has ended more than RETENTION_S ago."""
        request = self.pick(which)
        if request.state == "done" and request.request_id in self.model.held and request.counts_stored:
            request.ended_long_ago = int(next(self.new_ids))
            self.lane.client.zadd(KEYS.ended(request.key), {request.request_id: request.ended_long_ago})

    @precondition(has_requests)
    @rule(queue=st.sampled_from(QUEUES), which=picks)
    def stray_entry(self, queue: str, which: int) -> None:
        """Add a second entry of a request, or an entry of an unknown request."""
        request_id = self.pick(which).request_id if which % 4 else "nobody"
        entry: Any = self.lane.client.xadd(KEYS.queue(queue), {"id": request_id, "cost": 1})
        self.model.streams[queue][entry.decode()] = (request_id, 1, 1)

    # --- checks -------------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.walks[-1] += 1
        live = [request_id for request_id in self.model.requests if request_id not in self.settled]
        snapshot, frames = self.lane.look(live, list(self.settled))
        self.check_published(snapshot, frames)
        self.check_counts(snapshot)
        self.check_queues(snapshot)
        self.check_held(snapshot)
        self.check_shares(snapshot)
        for request_id, length in self.settled.items():
            assert snapshot.settled[request_id] == ("done", length)
        for request_id in live:
            self.check_request(request_id, snapshot)

    def check_published(self, snapshot: Snapshot, frames: list[tuple[str, bytes]]) -> None:
        expected: defaultdict[str, bytes] = defaultdict(bytes)
        for gateway, items in self.model.published:
            expected[KEYS.channel(gateway)] += b"".join(items)
        self.model.published.clear()
        published: defaultdict[str, bytes] = defaultdict(bytes)
        for channel, frame in frames:
            published[channel] += frame
            # I2: what a client sees is in the log, and it never sees a gap.
            for item in decoded(frame):
                entry = f"{item.end}-{1 if item.outcome else 0}"
                assert item.request_id in snapshot.requests, "published after the end"
                log = snapshot.requests[item.request_id].log
                assert (entry, item) in [(entry, *decoded(data)) for entry, data in log]
                assert item.start <= self.seen[item.request_id]
                self.seen[item.request_id] = max(item.end, self.seen[item.request_id])
                self.ends_seen[item.request_id] += item.outcome is not None
                assert self.ends_seen[item.request_id] <= 1
        assert published == expected

    def check_counts(self, snapshot: Snapshot) -> None:
        # I1: each accepted request has one outcome, or waits, or runs, or is parked; load counts the waiting requests.
        assert snapshot.totals == self.model.totals
        assert snapshot.recoveries == +self.model.recoveries
        going = [request for request in snapshot.requests.values() if request.state != "done"]
        ended = sum(snapshot.totals.get(outcome, 0) for outcome in OUTCOMES)
        assert snapshot.totals.get("accepted", 0) == ended + len(going)
        waiting = [request for request in going if request.state == "queued"]
        for name in ("", *PRIORITY_CLASSES):
            costs = [request.cost for request in waiting if name in ("", request.priority_class)]
            suffix = f":{name}" if name else ""
            assert snapshot.load.get(f"requests{suffix}", 0) == len(costs)
            assert snapshot.load.get(f"tokens{suffix}", 0) == sum(costs)
        assert snapshot.dead == len(self.model.dead) == snapshot.totals.get("quarantined", 0)

    def check_held(self, snapshot: Snapshot) -> None:
        held = dict(snapshot.held)
        total = int(held.pop("", 0))
        assert held == {name: f"{size} {key}" for name, (key, size) in self.model.held.items()}
        assert total == sum(size for _, size in self.model.held.values())
        assert snapshot.holders == {key: self.model.held_by(key) for key, _ in self.model.held.values()}
        parked = [one for one in self.model.requests.values() if one.state == "parked"]
        for key in API_KEYS:
            assert snapshot.parked_of[key] == {one.request_id for one in parked if one.key == key}

    def check_queues(self, snapshot: Snapshot) -> None:
        for name, entries in snapshot.streams.items():
            assert entries == {entry: request_id for entry, (request_id, *_) in self.model.streams[name].items()}
        assert snapshot.pending.keys() == self.model.pending.keys()
        for place, (consumer, idle_ms) in snapshot.pending.items():
            assert (consumer, idle_ms > LEASE_MS) == (
                self.model.pending[place].worker,
                self.model.pending[place].is_old,
            )

    def check_shares(self, snapshot: Snapshot) -> None:
        costs: defaultdict[str, list[int]] = defaultdict(list)
        for name, found in snapshot.fair.items():
            check_group(found, self.model.fair.tenants[name])
            for tenant in TENANTS:
                check_group(found.users[tenant], self.model.fair.users[name, tenant])
                for user, entries in found.users[tenant].lines.items():
                    line = self.model.fair.lines[name, tenant, user]
                    assert [snapshot.streams[f"waiting:{name}"].get(entry) for entry in entries] == [
                        one[1] for one in line
                    ]
                    costs[tenant] += [self.model.requests[request_id].cost for _, request_id, *_ in line]
        expected = {f"requests {tenant}": len(found) for tenant, found in costs.items() if found}
        expected |= {f"tokens {tenant}": sum(found) for tenant, found in costs.items() if found}
        assert snapshot.waiting == expected
        # A worker that blocks reads this entry, so no line waits while a worker is idle.
        assert snapshot.wakes == 1 or not expected

    def check_request(self, request_id: str, snapshot: Snapshot) -> None:
        request, redis = self.model.requests[request_id], snapshot.requests[request_id]
        assert redis.log == request.log
        # I2, by the log alone: contiguous, the terminal entry once and last.
        end, outcome = 0, None
        for entry, data in redis.log:
            [item] = decoded(data)
            assert outcome is None
            assert item.start == end
            end, outcome = item.end, item.outcome
            assert entry == f"{end}-{1 if outcome else 0}"
            for delta in item.deltas:
                assert delta.token_ids == tuple(token(request_id, index) for index in range(item.start, end))
        assert redis.emitted == end
        assert (redis.state == "done") == (outcome is not None) == (redis.outcome != "")
        assert outcome is None or outcome.name == redis.outcome
        is_there = bool(redis.queue) and snapshot.streams[redis.queue].get(redis.entry) == request_id
        assert (request_id in snapshot.parked) == (redis.state == "parked")
        if redis.state == "done":
            # A finished request is neither pending nor in a queue, has no body, and all its keys expire.
            assert not is_there
            assert (redis.queue, redis.entry) not in snapshot.pending
            assert not redis.has_body
            retention_s = request.retention_s or RETENTION_S
            for ttl in (redis.ttl, redis.log_ttl, *((redis.conversation_ttl,) if request.conversation else ())):
                assert retention_s - 60 < ttl <= retention_s
            self.settled[request_id] = len(redis.log)
        else:
            assert is_there == (redis.state != "parked")
            assert not request.waits_in_line or redis.state == "queued"
            assert (redis.queue, redis.entry) in snapshot.pending or redis.state != "running"
            assert (redis.ttl, redis.has_body) == (-1, True)
            assert redis.conversation_ttl == (-1 if request.conversation else -2)
        assert redis.conversation == request.conversation
        assert redis.state == request.state
        assert (redis.queue, redis.entry, redis.gateway) == (request.queue, request.entry, request.gateway)
        assert (redis.is_cancelled, redis.outcome) == (request.is_cancelled, request.outcome)
        assert (redis.deaths, redis.all_deaths) == (request.deaths, request.all_deaths)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.drain()
        finally:
            self.lane.close()

    def drain(self) -> None:
        """One last worker takes and ends all remaining requests. Only counters may remain in Redis."""
        for name in ("w0", "w1", "w2"):
            self.lease_runs_out(name)
        last = self.workers["last"] = Worker("last")
        self.readers["last"] = self.lane.reader("last")
        for request in self.model.requests.values():
            if request.state == "parked":
                self.call(
                    partial(self.lane.broker.unpark, request.request_id),
                    partial(self.model.unpark, request.request_id, NO_BOUNDS, STORED_S),
                )
        while True:
            self.reclaim("last", 100)
            self.read("last", 100, 0)
            if not last.handed:
                break
            while last.handed:
                self.claim("last", 0, False, False)
            self.commit_step(last, [(attempt, 1, 0, "stop") for attempt in last.held], False)
            self.holds()
        assert all(request.state == "done" for request in self.model.requests.values())
        client: Any = self.lane.client
        # I5
        for name in QUEUES:
            assert client.xlen(KEYS.queue(name)) == 0
            assert client.xpending(KEYS.queue(name), "workers")["pending"] == 0
        assert set(client.hvals(KEYS.load)) <= {b"0"}
        # A request counts until its keys are gone.
        for request in list(self.model.requests.values()):
            self.model.forget(request)
            client.delete(KEYS.request(request.request_id), KEYS.output(request.request_id))
            client.delete(KEYS.conversation(request.request_id))
            client.zadd(KEYS.due, {request.request_id: 1}, xx=True)
        self.settled.clear()
        bounds = replace(BOUNDS, stored_bytes=1, key_bytes=1)
        last_one = Request("last", "standard", 1, "g", True, NONE)
        self.call(
            lambda: self.lane.broker.submit(
                "last", b"", Admission(gateway="g", cost=1, bounds=bounds, is_background=True)
            ),
            lambda: self.model.submit(last_one, bounds, "", ""),
        )
        assert client.hgetall(KEYS.held) in ({}, {b"": b"0"})
        lasting = {KEYS.load, KEYS.totals, KEYS.recoveries, KEYS.dead, KEYS.held, *map(KEYS.queue, QUEUES)}
        lasting |= {KEYS.wake, *map(KEYS.queue, WAITING_QUEUES), *map(KEYS.served, PRIORITY_CLASSES)}
        for name in WAITING_QUEUES:
            assert client.xlen(KEYS.queue(name)) == 0
        keys = [key.decode() for key in client.scan_iter()]
        assert {key for key in keys if client.ttl(key) < 0} <= lasting
        assert not client.exists(KEYS.parked, KEYS.holders, KEYS.due)


def check_group(found: FairSnapshot, group: Group) -> None:
    assert found.served == group.stored()
    assert found.waiting.keys() == group.waiting
    assert all(bound <= group.counters[name] for name, bound in found.waiting.items())


def _unordered(reply: StepReply) -> StepReply:
    return StepReply(
        tuple(sorted(reply.lost)),
        tuple(sorted(reply.cancelled)),
        tuple(sorted(reply.expired)),
        reply.behind,
        tuple(sorted(reply.notices)),
    )


def walk(server: RedisServer, walks: int, steps: int, patch: Patch = (), **options: Any) -> list[int]:
    """Let the machine walk; raises at the first step that leaves the model. Returns the steps of each walk."""
    machine = type("Machine", (ProtocolMachine,), {"server": server, "patch": patch, "walks": []})
    configuration = settings(
        max_examples=walks,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        **{"derandomize": True, "phases": (Phase.generate,), **options},
    )
    run_state_machine_as_test(machine, settings=configuration)
    return machine.walks


# Bugs that queues of this kind have had: the name of the bug, and the patch that puts it into a script.
BUGS: dict[str, Patch] = {
    "the fence is dropped": (("if state[1] ~= attempt or (state[2]", "if (state[2]"),),
    "the entry is acknowledged before the terminal is logged": (
        (
            "    if redis.call('HINCRBY', KEYS[1], 'deliveries', 1) > 1 then\n",
            "    redis.call('XACK', prefix .. 'queue:' .. queue, 'workers', entry)\n"
            "    if redis.call('HINCRBY', KEYS[1], 'deliveries', 1) > 1 then\n",
        ),
    ),
    "an attempt token is used again": (
        # The worker's name serves as the token: its second attempt has that of its first.
        ("KEYS[1], 'state', 'running', 'attempt', attempt,", "KEYS[1], 'state', 'running', 'attempt', worker,"),
        ("if req[8] ~= attempt then", "if req[8] ~= worker then"),
        (
            "if state[1] ~= attempt or (state[2]",
            "if state[1] ~= string.match(KEYS[1], 'worker:(.+):mailbox') or (state[2]",
        ),
        ("if req[1] == ARGV[i + 1] and req[2] == 'running' then", "if req[2] == 'running' then"),
        ("elseif req[1] ~= ARGV[i + 1] then", "elseif req[1] ~= worker then"),
    ),
    "tokens are published before the log has them": (
        (
            "    elseif state[2] == 'running' then\n        if first > emitted",
            "    elseif state[2] == 'running' then\n        frames[state[4]] = frames[state[4]] or {}\n"
            "        table.insert(frames[state[4]], item)\n        if first > emitted",
        ),
        ("                table.insert(frames[gateway], item)\n", ""),
    ),
    "the start index is ignored": (
        ("if first > emitted or (first < emitted and last > emitted) then", "if false then"),
        ("elseif first == emitted and (", "elseif ("),
    ),
    "a notice is gone once it was read": (
        (
            "local notices = redis.call('HGETALL', KEYS[1])\n",
            "local notices = redis.call('HGETALL', KEYS[1])\nredis.call('DEL', KEYS[1])\n",
        ),
    ),
    "a cancelled request stays in its line": (
        (
            "    if share and own[1] == WAITING .. share.class then\n        leave_line(",
            "    if share and own[1] == WAITING .. share.class then\n        (function() end)(",
        ),
    ),
    "an idle tenant saves up service": (
        ("    if own and own >= floor then\n        return own\n", "    if own then\n        return own\n"),
    ),
    "output tokens are not charged": (("charge_output(prefix, served)\n", ""),),
    "what is computed again is charged again": (
        ("'running' and tokens > before then", "'running' then"),
        ("serve(state[6], tokens - before)", "serve(state[6], tokens)"),
    ),
    "what was computed is charged again with the answer": (("    if first == 0 and outcome ~= ''", "    if false"),),
    "a worker reads more than its rows": (("local rows = found and rows_of(found[2]) or 1\n", "local rows = 1\n"),),
    "a request that never ran is charged": (("already\n        refund_prompt(prefix, share)\n", "already\n"),),
    "the first of a line keeps its place in the stream": (("        put_back(prefix, class, unread)\n", ""),),
    "no worker is woken": (("share, '*')\n    wake(prefix)\n", "share, '*')\n"),),
    "a parked request leaves its attempt alive": (
        ("'state', 'parked', 'deadline', 0,", "'state', 'running', 'deadline', 0,"),
    ),
    "a parked request stays in its queue": (("take_off_queue(prefix, req[4], req[5])\n", ""),),
    "a parked request that ends stays in the set": (("    if own[5] == 'parked' then\n", "    if false then\n"),),
    "a request is claimed without its entry": (("if not pending or pending[2] ~= worker then", "if false then"),),
}
# The latest of these bugs is found in the 8th walk of 200 steps (with 100 steps per walk, in the 40th).
WALKS, STEPS = 60, 200


def test_the_scripts_do_what_the_model_does_in_a_few_walks(redis_server: RedisServer) -> None:
    walk(redis_server, 8, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_scripts_do_what_the_model_does(redis_server: RedisServer) -> None:
    walks = walk(redis_server, WALKS, STEPS)
    # Hypothesis ends about one walk in six early.
    assert sum(steps >= STEPS for steps in walks) >= 0.7 * WALKS


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_finds(bug: str, redis_server: RedisServer) -> None:
    with pytest.raises(AssertionError):
        walk(redis_server, WALKS, STEPS, BUGS[bug])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_scripts_do_what_the_model_does_for_long(redis_server: RedisServer) -> None:
    """Each run takes other walks for about ten minutes, and reports the shortest failing walk."""
    walk(redis_server, 2000, 200, derandomize=False, phases=(Phase.generate, Phase.shrink))
