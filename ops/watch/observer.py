"""What `quire top` shows: a look at all lanes, whose cost does not depend on the number of requests.

Each look reads counters, and the oldest requests of each queue, OLDEST at most. Rates come from two looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.broker.lane_state import LaneState, read_lane
from quire.shared.protocol.keys import QUEUES, WAITING_QUEUES
from quire.shared.protocol.messages import MessageError, WorkerCard
from quire.shared.protocol.states import COMPLETE, RequestState

# Requests of each queue, and workers of each lane, that a look reads at most.
OLDEST = 32
MAX_WORKERS = 64
_FIELDS = ("state", "class", "owner", "emitted", "created", "first_at")


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request that waits or runs. first_s: time to its first token; None before it. rate: tokens per second."""

    id: str
    model: str
    state: str
    priority_class: str
    worker: str
    tokens: int
    age_s: float
    first_s: float | None
    rate: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker with a heartbeat. blocks: share of its KV cache that is in use. home: its process (leases.py)."""

    id: str
    model: str
    running: int
    waiting: int
    rows: int
    blocks: float
    silent_s: float
    rate: float
    home: str


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A model. waiting: requests by class. failed: requests that ended without an answer, by outcome."""

    model: str
    waiting: dict[str, int]
    oldest_s: float
    running: int
    parked: int
    dead: int
    accepted: int
    accepted_per_s: float
    failed: dict[str, int]
    recoveries: dict[str, int]
    rate: float


@dataclass(slots=True)
class Look:
    """All lanes at one moment. requests: those without a token first, then the slowest answers."""

    at_ms: int = 0
    lanes: list[LaneRow] = field(default_factory=list)
    workers: list[WorkerRow] = field(default_factory=list)
    requests: list[RequestRow] = field(default_factory=list)


class Observer:
    """Looks at lanes again and again."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self.brokers = {broker.keys.lane: broker for broker in brokers}
        self._emitted: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self._at_ms = 0

    async def look(self) -> Look:
        """Look at all lanes. Raise RedisError or OSError."""
        found, emitted, accepted = Look(), dict[str, int](), dict[str, int]()
        for broker in self.brokers.values():
            await self._look_at(broker, found, emitted, accepted)
        found.requests.sort(key=lambda row: (row.first_s is not None, row.rate, -row.age_s))
        self._emitted, self._accepted, self._at_ms = emitted, accepted, found.at_ms
        return found

    async def _look_at(self, broker: Broker, found: Look, emitted: dict[str, int], accepted: dict[str, int]) -> None:
        keys, pipe = broker.keys, broker.client.pipeline(transaction=False)
        lane = await read_lane(broker)
        pipe.time()
        pipe.hgetall(keys.recoveries)
        pipe.zrevrange(keys.workers, 0, MAX_WORKERS - 1)
        for name in (*QUEUES, *WAITING_QUEUES):
            pipe.xrange(keys.queue(name), count=OLDEST)
        (seconds, micros), recoveries, workers, *entries = await pipe.execute()
        found.at_ms = 1000 * seconds + micros // 1000
        ids = list(dict.fromkeys(text(values[b"id"]) for queue in entries for _, values in queue if b"id" in values))
        gone = [id_ for id_ in self._emitted if id_.startswith(f"{keys.lane} ") and id_.split(" ")[1] not in ids]
        pipe = broker.client.pipeline(transaction=False)
        for worker in workers:
            pipe.hmget(keys.worker(text(worker)), "card", "home", "beat")
        for id_ in (*ids, *(name.split(" ")[1] for name in gone)):
            pipe.hmget(keys.request(id_), *_FIELDS)
        replies = await pipe.execute() if workers or ids or gone else []
        rates: dict[str, float] = {}
        for id_, values in zip((*ids, *(name.split(" ")[1] for name in gone)), replies[len(workers) :], strict=True):
            fields = {name: text(value or b"") for name, value in zip(_FIELDS, values, strict=True)}
            rate = self._rate(f"{keys.lane} {id_}", fields, found.at_ms)
            rates[fields["owner"]] = rates.get(fields["owner"], 0.0) + rate
            if fields["state"] in (RequestState.QUEUED, RequestState.RUNNING):
                emitted[f"{keys.lane} {id_}"] = _number(fields["emitted"])
                found.requests.append(_request(id_, keys.lane, fields, rate, found.at_ms))
        for name, (card, home, beat) in zip(workers, replies, strict=False):
            if row := _worker(text(name), card, text(home or b""), found.at_ms - _number(text(beat or b"")), rates):
                found.workers.append(row)
        accepted[keys.lane] = lane.accepted
        found.lanes.append(self._lane(keys.lane, lane, recoveries, sum(rates.values(), 0.0), found.at_ms))

    def _rate(self, key: str, fields: Mapping[str, str], now_ms: int) -> float:
        """Return the tokens per second since the last look, or since the first token for a request that is new."""
        before, since_ms = self._emitted.get(key), self._at_ms
        if before is None:
            before, since_ms = 0, _number(fields["first_at"])
            if fields["state"] == RequestState.DONE or not since_ms:
                return 0.0
        return max(0, _number(fields["emitted"]) - before) / max(0.001, (now_ms - since_ms) / 1000)

    def _lane(self, name: str, lane: LaneState, recoveries: Mapping[Any, Any], rate: float, now_ms: int) -> LaneRow:
        before, passed_s = self._accepted.get(name, lane.accepted), max(0.001, (now_ms - self._at_ms) / 1000)
        return LaneRow(
            name,
            lane.waiting,
            max(lane.oldest_s.values(), default=0.0),
            lane.running,
            lane.parked,
            lane.dead,
            lane.accepted,
            max(0, lane.accepted - before) / passed_s,
            {outcome: count for outcome, count in lane.ended.items() if count and outcome not in COMPLETE},
            {text(what): _number(text(count)) for what, count in recoveries.items()},
            rate,
        )


def _request(id_: str, model: str, fields: Mapping[str, str], rate: float, now_ms: int) -> RequestRow:
    created, first = _number(fields["created"]), _number(fields["first_at"])
    return RequestRow(
        id_,
        model,
        fields["state"],
        fields["class"],
        fields["owner"],
        _number(fields["emitted"]),
        max(0, now_ms - created) / 1000,
        (first - created) / 1000 if first else None,
        rate,
    )


def _worker(name: str, card: bytes | None, home: str, silent_ms: int, rates: Mapping[str, float]) -> WorkerRow | None:
    """Return a worker; None if it has gone, or is of another version."""
    try:
        known = WorkerCard.decode(card) if card else None
    except MessageError:
        return None
    if known is None:
        return None
    blocks = 1 - known.free_blocks / known.total_blocks
    rows, rate = known.max_num_seqs, rates.get(name, 0.0)
    return WorkerRow(name, known.model, known.running, known.waiting, rows, blocks, silent_ms / 1000, rate, home)


def _number(value: str) -> int:
    return int(value) if value.isdecimal() and len(value) < 16 else 0
