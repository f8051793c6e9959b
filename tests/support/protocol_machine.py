"""A machine of Hypothesis that lets gateways, workers and faults act on the scripts and on the model at random.

A walk never sleeps: instead of waiting for a lease to run out it makes entries old, and it sets deadlines back. For a
lost reply it makes a call twice and ignores the first answer.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from quire.shared.protocol.broker import Admission, Claim, ComputedTokens, StepCommit, StreamEntry
from quire.shared.protocol.broker.parking import NO_BOUNDS
from quire.shared.protocol.keys import PRIORITY_CLASSES, QUEUES, WAITING_QUEUES
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from tests.support.protocol_affinity import AffinityActions
from tests.support.protocol_checks import LEASE_MS, token
from tests.support.protocol_driver import KEYS, Lane, Patch, Saved
from tests.support.protocol_gateways import BOUNDS, GATEWAYS, STORED_S, GatewayActions, losses, picks
from tests.support.protocol_model import AHEAD, NONE, PASSED, ProtocolModel, Request
from tests.support.redis_server import RedisServer

worker_names = st.sampled_from(("w0", "w1", "w2"))
# The part of a step for one request: which request; how many tokens; the error of their start; the outcome.
SIZES = range(4)
SHIFTS = (0, 0, 0, 0, 0, -2, -1, 1)
ENDINGS = (None, None, None, None, "stop", "length")
sizes = st.sampled_from(SIZES)
endings = st.sampled_from(ENDINGS)
counts = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12)), max_size=2)
moves = st.sampled_from(tuple(product(range(8), SIZES, SHIFTS, ENDINGS)))  # one draw is faster than four draws


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


class ProtocolMachine(AffinityActions, RuleBasedStateMachine):
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

    @precondition(GatewayActions.has_requests)
    @rule(which=picks)
    def deadline_passes(self, which: int) -> None:
        request = self.pick(which)
        if request.deadline == AHEAD and request.state != "parked":
            request.deadline = PASSED
            self.lane.client.hset(KEYS.request(request.request_id), "deadline", 1)

    @precondition(GatewayActions.has_requests)
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

    @precondition(GatewayActions.has_requests)
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

    @precondition(GatewayActions.has_requests)
    @rule(which=picks)
    def end_is_long_ago(self, which: int) -> None:
        """A request that stays has ended more than RETENTION_S ago."""
        request = self.pick(which)
        if request.state == "done" and request.request_id in self.model.held and request.counts_stored:
            request.ended_long_ago = int(next(self.new_ids))
            self.lane.client.zadd(KEYS.ended(request.key), {request.request_id: request.ended_long_ago})

    @precondition(GatewayActions.has_requests)
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
        lasting |= {KEYS.wake, KEYS.workers, *map(KEYS.queue, WAITING_QUEUES), *map(KEYS.served, PRIORITY_CLASSES)}
        for name in WAITING_QUEUES:
            assert client.xlen(KEYS.queue(name)) == 0
        keys = [key.decode() for key in client.scan_iter()]
        assert {key for key in keys if client.ttl(key) < 0} <= lasting
        assert not client.exists(KEYS.parked, KEYS.holders, KEYS.due)


def walk(server: RedisServer, walks: int, steps: int, patch: Patch = (), **options: Any) -> type[ProtocolMachine]:
    """Let the machine walk; raises at the first step that leaves the model. Returns the machine with its records."""
    records = {"walks": [], "transitions": set()}
    machine = type("Machine", (ProtocolMachine,), {"server": server, "patch": patch, **records})
    configuration = settings(
        max_examples=walks,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,  # otherwise as many walks follow the first failure as came before it
        suppress_health_check=list(HealthCheck),
        **{"derandomize": True, "phases": (Phase.generate,), **options},
    )
    run_state_machine_as_test(machine, settings=configuration)
    return machine
