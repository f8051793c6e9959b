"""The contract of the scripts as a model in plain Python: every verb, with the reply that it must give.

The model has no clock: the test decides when a lease runs out or a deadline passes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from quire.shared.protocol.broker import (
    MAX_DEATHS,
    Attachment,
    Claim,
    ComputedTokens,
    QueueBounds,
    StepCommit,
    StepReply,
    StreamEntry,
)
from quire.shared.protocol.broker.parking import NO_BOUNDS
from quire.shared.protocol.keys import (
    HIDDEN_RETENTION_S,
    LOG_BYTES_PER_TOKEN,
    QUEUES,
    STORED_BYTES,
    WAITING,
    WAITING_QUEUES,
)
from quire.shared.protocol.messages import Outcome, StepItem
from tests.support.fair_model import ANYBODY, FairModel, Share

MAX_DEATHS_IN_ALL = 10
# Deadlines of requests.
NONE, AHEAD, PASSED = range(3)


@dataclass
class Request:
    request_id: str
    priority_class: str
    cost: int
    gateway: str
    is_background: bool
    deadline: int
    state: str = "queued"
    queue: str = ""
    entry: str = ""
    owner: str = ""
    incarnation: str = ""
    attempt: str = ""
    emitted: int = 0
    computed: int = 0
    log: list[tuple[str, bytes]] = field(default_factory=list)
    is_cancelled: bool = False
    listeners: list[str] = field(default_factory=list)
    outcome: str = ""
    deaths: int = 0
    died_at: int = -1
    all_deaths: int = 0
    deliveries: int = 0
    before: str = ""
    waits: bool = False
    retention_s: int = 0  # 0: the default
    is_hidden: bool = False
    is_stored: bool = False
    counts_stored: bool = True
    has_lapsed: bool = False  # parked for longer than its retention
    share: Share = ANYBODY
    prompt_tokens: int = 0
    rows: int = 1
    arrival: int = 0
    key: str = ""
    ended_long_ago: int = 0  # an order, once it may go for others
    is_left: bool = False

    @property
    def waits_in_line(self) -> bool:
        return self.queue in WAITING_QUEUES

    @property
    def used(self) -> int:
        return max(self.emitted, self.computed)

    @property
    def body(self) -> bytes:
        """The body; no client can come back for a line of a batch, so that one has none after its end."""
        return b"" if self.state == "done" and not self.counts_stored else b"body of " + self.request_id.encode()

    @property
    def metadata(self) -> bytes:
        return b"" if self.is_hidden else b"about " + self.request_id.encode()

    @property
    def conversation(self) -> bytes:
        return b"conversation of " + self.request_id.encode() if self.is_stored else b""

    @property
    def traceparent(self) -> str:
        return f"trace of {self.request_id}"


@dataclass
class Pending:
    worker: str
    is_old: bool = False


class ProtocolModel:
    """One lane. A verb returns what the broker's must return, and notes what must be published."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.keys: dict[str, tuple[str, str]] = {}  # idempotency key to request and fingerprint
        # Entry to request, cost and rows, oldest first.
        self.streams: dict[str, dict[str, tuple[str, int, int]]] = {name: {} for name in (*QUEUES, *WAITING_QUEUES)}
        self.pending: dict[tuple[str, str], Pending] = {}
        self.mailboxes: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self.totals: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self.dead: list[str] = []
        self.published: list[tuple[str, list[bytes]]] = []
        self.held: dict[str, tuple[str, int]] = {}  # request that stays: its API key and its bytes
        self.gone: set[str] = set()  # of these, those whose keys are gone
        # In a queue, under an entry id that Redis has yet to tell, and perhaps read by a worker.
        self.unplaced: list[tuple[Request, str]] = []
        self.fair = FairModel()
        # The request that the last read left because of its rows.
        self.too_wide = ""

    # --- gateway ------------------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, bounds: QueueBounds, key: str, fingerprint: str, beside: str = ""
    ) -> str | tuple[str, int, int] | tuple[str, str, int]:
        request_id = request.request_id
        if (known := self.requests.get(request_id)) is not None:
            if known.state != "done" and request.gateway not in known.listeners:
                known.listeners.insert(0, request.gateway)
            return request_id
        if key in self.keys and self.keys[key][0] in self.requests:
            first, first_fingerprint = self.keys[key]
            return first if first_fingerprint == fingerprint else "conflict"
        requests, tokens = self.queued()
        if self._is_full(request, requests, tokens, bounds):
            return ("full", requests, tokens)
        stays = request.counts_stored and bool(request.retention_s or request.is_background)
        if stays and (refusal := self._make_room(request.key, self._weight(request), bounds)):
            return refusal
        self.requests[request_id] = request
        if stays:
            self.held[request_id] = request.key, self._weight(request)
        others = self.requests[beside].listeners if beside in self.requests else []
        request.listeners = [*(other for other in others if other != request.gateway), request.gateway]
        self.totals["accepted"] += 1
        self._enqueue_fairly(request)
        if key:
            self.keys[key] = (request_id, fingerprint)
        return request_id

    def states(self) -> dict[str, str]:
        return {request_id: request.state for request_id, request in self.requests.items()}

    def queued(self) -> tuple[int, int]:
        waiting = [request.cost for request in self.requests.values() if request.state == "queued"]
        return len(waiting), sum(waiting)

    def attach(self, request_id: str, gateway: str) -> Attachment | None:
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.state != "done":
            request.gateway = gateway
            request.listeners = [name for name in request.listeners if name != gateway] + [gateway]
        return Attachment(request.state == "done", request.metadata)

    def detach(self, request_id: str, gateway: str) -> list[str]:
        request = self.requests.get(request_id)
        if request is None or request.state == "done":
            return []
        request.listeners = [name for name in request.listeners if name != gateway]
        request.gateway = request.listeners[-1] if request.listeners else request.gateway
        return request.listeners

    def cancel(self, request_id: str, unless_beside: Sequence[str] | None) -> str:
        request = self.requests.get(request_id)
        if request is None:
            return "unknown"
        if request.state == "done":
            return "done"
        if unless_beside is not None and (set(request.listeners) - set(unless_beside) or request.state == "parked"):
            return "wanted"
        if request.state in ("queued", "parked"):
            self._finish_unowned(request, "cancelled", "")
            return "cancelled"
        request.is_cancelled = True
        self.mailboxes[request.owner][request_id] = "cancel"
        return "flagged"

    def expire(self, request_id: str) -> str:
        request = self.requests.get(request_id)
        if request is None:
            return "unknown"
        if request.state == "done":
            return "done"
        if request.state == "parked":
            return "expired" if self._has_lapsed(request) else "early"
        if request.deadline != PASSED:
            return "early"
        if request.state == "queued":
            detail = "the deadline passed while the request was waiting"
        else:
            detail = "the deadline passed, and no worker took notice"
            self.mailboxes[request.owner][request_id] = request.attempt
        self._finish_unowned(request, "deadline", detail)
        return "expired"

    def delete(self, request_id: str) -> str:
        request = self.requests.get(request_id)
        if request is None:
            return "unknown"
        if request.state == "done":
            del self.requests[request_id]
            self.held.pop(request_id, None)
            return "deleted"
        request.retention_s, request.is_hidden, request.is_stored = HIDDEN_RETENTION_S, True, False
        if request_id in self.held:
            self.held[request_id] = request.key, self._weight(request)
        return "hidden"

    # --- worker -------------------------------------------------------------------------------------------------------

    def read(self, worker: str, rows: int, queues: Sequence[str], widest: int) -> list[StreamEntry]:
        found: list[StreamEntry] = []
        self.too_wide = ""
        for name in queues:
            new = [(name, entry) for entry in self.streams[name] if (name, entry) not in self.pending]
            found += self._deliver(worker, new, rows - sum(entry.rows for entry in found))
            while (left := rows - sum(entry.rows for entry in found)) > 0 and (request_id := self.fair.next(name)):
                request = self.requests[request_id]
                if request.rows > (left if found else widest):
                    self.too_wide = request_id
                    return found
                self.fair.take(name)
                self._take_off(request.queue, request.entry)
                self._enqueue(request, name, worker)
                found.append(StreamEntry(name, "", request_id, request.cost, request.rows))
        return found

    def read_pending(self, worker: str) -> list[StreamEntry]:
        return self._deliver(worker, [place for place in self._places() if self._is_of(worker, place)])

    def reclaim(self, worker: str, rows: int) -> list[StreamEntry]:
        old = [place for place in self._places() if place in self.pending and self.pending[place].is_old]
        return self._deliver(worker, old, rows)

    def claim(self, delivery: StreamEntry, worker: str, attempt: str, incarnation: str) -> Claim | None:
        request, place = self.requests.get(delivery.request_id), (delivery.queue, delivery.entry_id)
        if not self._is_of(worker, place):
            return None
        if request is None or request.state in ("done", "parked") or (request.queue, request.entry) != place:
            self._take_off(*place)
            return None
        if self._is_unwanted(request):
            return None
        if request.attempt != attempt:
            if request.state == "running" and request.incarnation != incarnation:
                if request.owner != worker:
                    self.mailboxes[request.owner][request.request_id] = request.attempt
                if not request.waits and self._has_died_too_often(request):
                    self.dead.append(request.request_id)
                    detail = "the worker died each time it ran this request"
                    self._finish_unowned(request, "quarantined", detail)
                    return None
            request.before = request.attempt or request.before
            request.state, request.attempt = "running", attempt
            request.owner, request.incarnation = worker, incarnation
            request.deliveries += 1
            self.recoveries["migrations"] += request.deliveries > 1
        deaths = 0 if request.emitted > request.died_at else request.deaths
        request.waits = deaths >= MAX_DEATHS - 1
        return Claim(
            request.request_id,
            attempt,
            request.gateway,
            request.priority_class,
            request.body,
            request.emitted,
            0,
            deaths,
            tuple(item for _, item in request.log),
            request.deliveries,
            request.traceparent,
            request.before,
            request.is_background,
        )

    def begin(self, request_id: str, attempt: str) -> bool:
        request = self.requests.get(request_id)
        if request is None or request.state != "running" or request.attempt != attempt:
            return False
        if self._is_unwanted(request):
            return False
        request.waits = False
        return True

    def _is_unwanted(self, request: Request) -> bool:
        """End a request that was cancelled or whose deadline passed; return whether it was."""
        if request.is_cancelled:
            self._finish_unowned(request, "cancelled", "")
        elif request.deadline == PASSED:
            self._finish_unowned(request, "deadline", "the deadline passed while the request was waiting")
        return request.state == "done"

    def commit_step(
        self,
        worker: str,
        commits: Sequence[StepCommit],
        obeyed: Sequence[tuple[str, str]],
        computed: Sequence[ComputedTokens] = (),
    ) -> StepReply:
        lost, cancelled, expired, behind = [], [], [], {}
        frames: defaultdict[str, list[bytes]] = defaultdict(list)
        mailbox = self.mailboxes[worker]
        for request_id, notice in obeyed:
            if mailbox.get(request_id) == notice:
                del mailbox[request_id]
        for request_id, notice in mailbox.items():
            if notice == "cancel":
                cancelled.append(request_id)
            else:
                lost.append((request_id, notice))
        for one in computed:
            counted = self.requests.get(one.request_id)
            if counted is None or counted.state != "running" or counted.attempt != one.attempt:
                if counted is None or (counted.state != "done" and counted.attempt != one.attempt):
                    lost.append((one.request_id, one.attempt))
                continue
            # The attempt after a death computes the same tokens again, which count once.
            before, counted.computed = counted.computed, max(one.tokens, counted.computed)
            self.fair.charge_output(counted.priority_class, counted.share, counted.computed - before)
        for attempt, item in ((commit.attempt, commit.item) for commit in commits):
            request = self.requests.get(item.request_id)
            if request is None or request.state == "queued" or request.attempt != attempt:
                self.recoveries["fenced"] += 1
                lost.append((item.request_id, attempt))
                continue
            if request.state == "done":
                if item.end > request.emitted:
                    self.recoveries["fenced"] += 1
                    lost.append((item.request_id, attempt))
                continue
            if item.start > request.emitted or item.start < request.emitted < item.end:
                behind[item.request_id] = request.emitted
            elif item.start == request.emitted and (item.outcome or item.end > item.start):
                request.log.append((f"{item.end}-{1 if item.outcome else 0}", item.encode()))
                request.emitted = item.end
                whole_at_once = item.start == 0 and item.outcome is not None
                counted_tokens = min(item.end, request.computed) if whole_at_once else item.start
                self.fair.charge_output(request.priority_class, request.share, item.end - counted_tokens)
                frames[request.gateway].append(item.encode())
                if item.outcome:
                    self._finish(request, item.outcome.name)
            if item.outcome is None:
                if request.is_cancelled:
                    cancelled.append(item.request_id)
                elif request.deadline == PASSED:
                    expired.append(item.request_id)
        self.published += frames.items()
        return StepReply(tuple(lost), tuple(cancelled), tuple(expired), behind, tuple(mailbox.items()))

    def renew(self, worker: str, attempts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        lost = []
        for request_id, attempt in attempts:
            request = self.requests.get(request_id)
            if request is None or request.attempt != attempt:
                lost.append((request_id, attempt))
            elif request.state == "running" and (request.queue, request.entry) in self.pending:
                self.pending[request.queue, request.entry] = Pending(worker)
        return lost

    def release(self, attempts: Sequence[tuple[str, str]]) -> int:
        released = 0
        for request_id, attempt in attempts:
            request = self.requests.get(request_id)
            if request is not None and request.state == "running" and request.attempt == attempt:
                self._take_off(request.queue, request.entry)
                request.before = request.attempt
                request.state, request.attempt, request.owner, request.incarnation = "queued", "", "", ""
                self._enqueue(request, "handed")
                released += 1
        return released

    # --- parking ------------------------------------------------------------------------------------------------------

    def park(
        self,
        request_id: str,
        attempt: str = "",
        max_parked: int = 0,
        max_of_key: int = 0,
        bounds: QueueBounds = NO_BOUNDS,
    ) -> str:
        request = self.requests.get(request_id)
        if request is None:
            return "unknown"
        if request.state in ("done", "parked"):
            return request.state
        if attempt and attempt != request.attempt:
            return "lost"
        if request.is_cancelled or request.deadline == PASSED:
            return "ending"
        parked = [one.key for one in self.requests.values() if one.state == "parked"]
        if max_parked and len(parked) >= max_parked:
            return "full"
        if max_of_key and request.key and parked.count(request.key) >= max_of_key:
            return "key_full"
        _, before = self.held.get(request_id, ("", 0))
        if self._make_room(request.key, self._weight(request) - before, bounds):
            return "no_room"
        if request.state == "running":
            self.mailboxes[request.owner][request_id] = request.before = request.attempt
        self._leave_share(request)
        self._take_off(request.queue, request.entry)
        request.state, request.queue, request.entry = "parked", "", ""
        request.attempt = request.owner = request.incarnation = ""
        request.waits, request.is_background, request.listeners, request.has_lapsed = False, True, [], False
        self.held[request_id] = request.key, self._weight(request)
        self.recoveries["parked"] += 1
        return "parked"

    def unpark(self, request_id: str, bounds: QueueBounds, retention_s: int) -> str | tuple[str, int, int]:
        """Queue a request. retention_s: for which it was parked."""
        request = self.requests.get(request_id)
        if request is None:
            return "unknown"
        if request.state != "parked":
            return "done" if request.state == "done" else "active"
        if self._has_lapsed(request):
            return "done"
        requests, tokens = self.queued()
        if self._is_full(request, requests, tokens, bounds):
            return ("full", requests, tokens)
        self._enqueue_fairly(request)
        request.state = "queued"
        if not request.retention_s:
            request.retention_s = retention_s
        self.recoveries["unparked"] += 1
        return "queued"

    def _has_lapsed(self, request: Request) -> bool:
        if request.has_lapsed:
            self._finish_unowned(request, "deadline", "the request was parked for longer than its retention")
        return request.has_lapsed

    # --- what happens by itself ---------------------------------------------------------------------------------------

    def cut_log(self, request: Request, kept: int) -> None:
        """Redis lost the tail of a log."""
        del request.log[kept:]
        request.emitted = int(request.log[-1][0].split("-")[0]) if request.log else 0

    def forget(self, request: Request) -> None:
        """The time that a finished request is kept for is over."""
        del self.requests[request.request_id]
        self.gone |= {request.request_id} & self.held.keys()

    def place(self, request: Request, entry: str, worker: str) -> None:
        """Redis told the id of the entry of a request. worker: that has read the entry; empty if none has."""
        request.entry = entry
        self.streams[request.queue][entry] = (request.request_id, request.cost, request.rows)
        if worker:
            self.pending[request.queue, entry] = Pending(worker)

    def _places(self) -> list[tuple[str, str]]:
        return [(name, entry) for name in QUEUES for entry in self.streams[name]]

    def _is_of(self, worker: str, place: tuple[str, str]) -> bool:
        return place in self.pending and self.pending[place].worker == worker

    def _deliver(self, worker: str, places: list[tuple[str, str]], rows: float = inf) -> list[StreamEntry]:
        """Deliver entries as long as a row is left; the last one may have more rows."""
        found: list[StreamEntry] = []
        for name, entry in places:
            if rows <= sum(one.rows for one in found):
                break
            self.pending[name, entry] = Pending(worker)
            found.append(StreamEntry(name, entry, *self.streams[name][entry]))
        return found

    def _enqueue(self, request: Request, queue: str, worker: str = "") -> None:
        request.queue, request.entry, request.is_left = queue, "", False
        self.unplaced.append((request, worker))

    def _enqueue_fairly(self, request: Request) -> None:
        """A request of one row that is alone waits in the stream; once there is another one, all wait in lines."""
        name = request.priority_class
        self.totals["arrivals"] += 1
        request.arrival = self.totals["arrivals"]
        if not self.fair.waits(name):
            unread = [entry for entry in self.streams[name] if (name, entry) not in self.pending]
            if not unread and request.rows == 1:
                self.fair.take_at_once(name, request.share, request.prompt_tokens)
                self._enqueue(request, name)
                return
            alone = self.requests.get(self.streams[name][unread[0]][0]) if unread else None
            if alone and (alone.state, alone.queue, alone.entry) == ("queued", name, unread[0]):
                self._take_off(name, alone.entry)
                self.fair.refund_prompt(name, alone.share, alone.prompt_tokens)
                self._join_line(alone)
        self._join_line(request)

    def _join_line(self, request: Request) -> None:
        name = request.priority_class
        self.fair.join(name, request.share, request.arrival, request.request_id, request.prompt_tokens)
        self._enqueue(request, WAITING + name)

    def _is_full(self, request: Request, requests: int, tokens: int, bounds: QueueBounds) -> bool:
        is_full = requests > 0 and (requests + 1 > bounds.requests or tokens + request.cost > bounds.tokens)
        return is_full and not self._is_below_part(request, requests, tokens, bounds)

    def _is_below_part(self, request: Request, requests: int, tokens: int, bounds: QueueBounds) -> bool:
        costs: defaultdict[str, list[int]] = defaultdict(list)
        for one in self.requests.values():
            if one.state == "queued" and one.waits_in_line:
                costs[one.share.tenant].append(one.cost)
        own = [*costs[request.share.tenant], request.cost]
        return (
            len(costs) > 1
            and requests + 1 <= 2 * bounds.requests
            and tokens + request.cost <= 2 * bounds.tokens
            and len(costs) * len(own) <= bounds.requests
            and len(costs) * sum(own) <= bounds.tokens
        )

    def _take_off(self, queue: str, entry: str) -> None:
        if queue:  # a parked request is in none
            self.streams[queue].pop(entry, None)
        self.pending.pop((queue, entry), None)

    def held_by(self, key: str) -> int:
        """The bytes of the requests of an API key that stay."""
        return sum(size for owner, size in self.held.values() if owner == key)

    def _weight(self, request: Request) -> int:
        texts = len(request.body) + len(request.metadata) + len(request.conversation)
        return STORED_BYTES + texts + LOG_BYTES_PER_TOKEN * request.emitted

    def _make_room(self, key: str, size: int, bounds: QueueBounds) -> tuple[str, str, int] | None:
        for request_id in self.gone:
            del self.held[request_id]
        self.gone.clear()
        while key and bounds.key_bytes and self.held_by(key) + size > bounds.key_bytes:
            if not self._drop_oldest(key):
                return ("no_room", key, self.held_by(key))
        while (
            bounds.stored_bytes and (total := sum(size for _, size in self.held.values())) + size > bounds.stored_bytes
        ):
            own = self.held_by(key) + size
            holders = sorted(((self.held_by(one), one) for one, _ in self.held.values()), reverse=True)
            larger = dict.fromkeys(one for held, one in holders if held > own)
            if not any(map(self._drop_oldest, (*larger, key))):
                return ("no_room", "", total)
        return None

    def _drop_oldest(self, key: str) -> bool:
        own = [one for one in self.requests.values() if one.key == key and one.request_id in self.held]
        old = min((one for one in own if one.ended_long_ago), key=lambda one: one.ended_long_ago, default=None)
        if old is not None:
            del self.requests[old.request_id], self.held[old.request_id]
        return old is not None

    def _leave_share(self, request: Request) -> None:
        if request.waits_in_line:
            self.fair.leave(request.priority_class, request.share, request.request_id)
        elif request.queue and not request.deliveries:
            self.fair.refund_prompt(request.priority_class, request.share, request.prompt_tokens)

    def _finish(self, request: Request, outcome: str) -> None:
        self._leave_share(request)
        if request.deliveries:
            self.fair.charge_user(request.priority_class, request.share, request.used)
        self._take_off(request.queue, request.entry)
        request.state, request.outcome = "done", outcome
        if request.request_id in self.held:
            self.held[request.request_id] = request.key, self._weight(request)
        self.totals[outcome] += 1

    def _finish_unowned(self, request: Request, outcome: str, detail: str) -> None:
        item = StepItem(request.request_id, request.emitted, (), Outcome(outcome, detail)).encode()
        request.log.append((f"{request.emitted}-1", item))
        self.published.append((request.gateway, [item]))
        self._finish(request, outcome)

    def _has_died_too_often(self, request: Request) -> bool:
        request.deaths = 1 if request.emitted > request.died_at else request.deaths + 1
        request.died_at = request.emitted
        request.all_deaths += 1
        return request.deaths >= MAX_DEATHS or request.all_deaths >= MAX_DEATHS_IN_ALL
