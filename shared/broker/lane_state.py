"""What waits, runs and has ended in a lane, read at one moment. For metrics: it costs a few commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from quire.shared.broker import Broker
from quire.shared.keys import GROUP, PRIORITY_CLASSES, QUEUES
from quire.shared.messages import OUTCOMES


@dataclass(frozen=True, slots=True)
class LaneState:
    """accepted = the sum of `ended` + waiting + running, at any moment.

    ended: by outcome. waiting, tokens: by priority class. oldest_s: by queue, how long its first entry that nobody has
    taken waits; 0 where there is none. dead: requests that were quarantined and are kept.
    """

    accepted: int
    ended: dict[str, int]
    waiting: dict[str, int]
    tokens: dict[str, int]
    running: int
    oldest_s: dict[str, float]
    dead: int


async def read_lane(broker: Broker) -> LaneState:
    """Raises RedisError or OSError."""
    keys = broker.keys
    pipe = broker.client.pipeline(transaction=True)
    pipe.hgetall(keys.totals)
    pipe.hgetall(keys.load)
    pipe.xlen(keys.dead)
    pipe.time()
    for name in QUEUES:
        pipe.xlen(keys.queue(name))
    for name in QUEUES:
        pipe.xinfo_groups(keys.queue(name))
    totals, load, dead, (seconds, micros), *rest = await pipe.execute(raise_on_error=False)
    for reply in (totals, load, dead, *rest[: len(QUEUES)]):
        if isinstance(reply, Exception):
            raise reply
    lengths, groups = rest[: len(QUEUES)], rest[len(QUEUES) :]
    waiting = {name: _count(load, f"requests:{name}") for name in PRIORITY_CLASSES}
    oldest = await _oldest(broker, dict(zip(QUEUES, groups, strict=True)), 1000 * seconds + micros // 1000)
    return LaneState(
        accepted=_count(totals, "accepted"),
        ended={name: _count(totals, name) for name in OUTCOMES},
        waiting=waiting,
        tokens={name: _count(load, f"tokens:{name}") for name in PRIORITY_CLASSES},
        # An entry leaves its queue when its request ends.
        running=sum(lengths) - sum(waiting.values()),
        oldest_s=oldest,
        dead=dead,
    )


async def _oldest(broker: Broker, groups: dict[str, Any], now_ms: int) -> dict[str, float]:
    """Of each queue, for how long its first entry behind what workers have taken is there."""
    pipe = broker.client.pipeline(transaction=False)
    for name, found in groups.items():
        # There is no group before the first worker, and no queue before the first request.
        known = [] if isinstance(found, ResponseError) else found
        taken = next((one["last-delivered-id"] for one in known if one["name"] == GROUP.encode()), b"0-0")
        pipe.xrange(broker.keys.queue(name), min=b"(" + taken, count=1)
    replies = await pipe.execute()
    return {
        name: max(0, now_ms - int(entries[0][0].split(b"-")[0])) / 1000 if entries else 0.0
        for name, entries in zip(groups, replies, strict=True)
    }


def _count(values: dict[bytes, bytes], name: str) -> int:
    return int(values.get(name.encode(), 0))
