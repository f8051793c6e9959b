"""Reads the state of a lane for metrics, with a few commands: waiting, running and ended requests at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.keys import GROUP, PRIORITY_CLASSES, QUEUES, WAITING, WAITING_QUEUES
from quire.shared.protocol.messages import OUTCOMES


@dataclass(frozen=True, slots=True)
class LaneState:
    """Requests and tokens of a lane. At any moment accepted = sum of `ended` + sum of `waiting` + running + parked.

    ended: by outcome. waiting, tokens: by priority class. tenants: those that wait in lines, by priority class.
    oldest_s: by queue, the age of the first entry that no worker has read, 0 for an empty queue. dead: length of the
    dead-letter stream.
    """

    accepted: int
    ended: dict[str, int]
    waiting: dict[str, int]
    tokens: dict[str, int]
    tenants: dict[str, int]
    running: int
    parked: int
    oldest_s: dict[str, float]
    dead: int


async def read_lane(broker: Broker) -> LaneState:
    """Read the state of a lane. Raise RedisError or OSError."""
    keys = broker.keys
    pipe = broker.client.pipeline(transaction=True)
    pipe.hgetall(keys.totals)
    pipe.hgetall(keys.load)
    pipe.xlen(keys.dead)
    pipe.zcard(keys.parked)
    pipe.time()
    queues = (*QUEUES, *WAITING_QUEUES)
    for name in queues:
        pipe.xlen(keys.queue(name))
    for name in PRIORITY_CLASSES:
        pipe.zcard(keys.tenants(name))
    for name in QUEUES:
        pipe.xinfo_groups(keys.queue(name))
    totals, load, dead, parked, (seconds, micros), *rest = await pipe.execute(raise_on_error=False)
    num_counts = len(queues) + len(PRIORITY_CLASSES)
    for reply in (totals, load, dead, parked, *rest[:num_counts]):
        if isinstance(reply, Exception):
            raise reply
    lengths, tenants, groups = rest[: len(queues)], rest[len(queues) : num_counts], rest[num_counts:]
    waiting = {name: _count(load, f"requests:{name}") for name in PRIORITY_CLASSES}
    oldest = await _oldest(broker, dict(zip(QUEUES, groups, strict=True)), 1000 * seconds + micros // 1000)
    return LaneState(
        accepted=_count(totals, "accepted"),
        ended={name: _count(totals, name) for name in OUTCOMES},
        waiting=waiting,
        tokens={name: _count(load, f"tokens:{name}") for name in PRIORITY_CLASSES},
        tenants=dict(zip(PRIORITY_CLASSES, tenants, strict=True)),
        # A running request stays in its queue until it ends.
        running=sum(lengths) - sum(waiting.values()),
        parked=parked,
        oldest_s=oldest,
        dead=dead,
    )


async def _oldest(broker: Broker, groups: dict[str, Any], now_ms: int) -> dict[str, float]:
    """Return the age of the first unread entry of each queue, in seconds."""
    pipe = broker.client.pipeline(transaction=False)
    for name, reply in groups.items():
        # The group exists from the first worker on, the queue from the first request on.
        known = [] if isinstance(reply, ResponseError) else reply
        taken = next((group["last-delivered-id"] for group in known if group["name"] == GROUP.encode()), b"0-0")
        pipe.xrange(broker.keys.queue(name), min=b"(" + taken, count=1)
    for name in WAITING_QUEUES:
        pipe.xrange(broker.keys.queue(name), count=1)
    oldest = dict.fromkeys(groups, 0.0)
    for name, entries in zip((*groups, *WAITING_QUEUES), await pipe.execute(), strict=True):
        if entries:
            age_s = max(0, now_ms - int(entries[0][0].split(b"-")[0])) / 1000
            oldest[name.removeprefix(WAITING)] = max(oldest[name.removeprefix(WAITING)], age_s)
    return oldest


def _count(values: dict[bytes, bytes], name: str) -> int:
    return int(values.get(name.encode(), 0))
