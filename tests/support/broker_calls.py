"""Calls of the broker as gateways and workers make them, with the arguments that tests do not care about."""

from __future__ import annotations

from quire.shared.protocol.broker import (
    Admission,
    Broker,
    Claim,
    QueueBounds,
    QueueReader,
    StepCommit,
    StepReply,
    StreamEntry,
    new_id,
)
from quire.shared.protocol.keys import GROUP, LaneKeys
from quire.shared.protocol.messages import Delta, Outcome, StepItem

KEYS = LaneKeys("lane")
BOUNDS = QueueBounds(requests=3, tokens=1000)
NOTHING = StepReply((), (), (), {})


async def submit(broker: Broker, request_id: str, cost: int = 10, deadline_ms: int = 0) -> None:
    await broker.submit(request_id, b"body", Admission(gateway="g", cost=cost, bounds=BOUNDS, deadline_ms=deadline_ms))


async def take(broker: Broker, worker_id: str = "w") -> StreamEntry:
    await broker.create_groups()
    [delivery] = await QueueReader(broker.client, "lane", worker_id).read(1, 0)
    return delivery


async def start(broker: Broker, request_id: str = "r", worker_id: str = "w") -> Claim:
    await submit(broker, request_id)
    claim = await broker.claim(await take(broker, worker_id), worker_id, new_id())
    assert claim is not None
    return claim


def step(claim: Claim, start: int, tokens: tuple[int, ...], outcome: str | None = None) -> StepCommit:
    end = Outcome(outcome) if outcome else None
    return StepCommit(claim.attempt, StepItem(claim.request_id, start, (Delta(0, tokens, outcome),), end))


async def go_stale(broker: Broker, request_id: str = "r", worker_id: str = "w", queue: str = "standard") -> None:
    """Let the lease of a request run out."""
    entry = await broker.client.hget(KEYS.request(request_id), "entry")
    assert entry is not None
    await broker.client.xclaim(KEYS.queue(queue), GROUP, worker_id, 0, [entry], idle=60_000, justid=True)


async def take_over(broker: Broker, worker_id: str = "w2", queue: str = "standard") -> Claim | None:
    """The lease of "r" runs out, and another worker reclaims and claims it."""
    await go_stale(broker, queue=queue)
    [delivery] = await broker.reclaim(worker_id, 30_000, 10)
    return await broker.claim(delivery, worker_id, new_id(), new_id())


async def recoveries_of(broker: Broker) -> dict[str, int]:
    counts = await broker.client.hgetall(broker.keys.recoveries)
    return {name.decode(): int(count) for name, count in counts.items()}


async def outcome_of(broker: Broker, request_id: str = "r") -> str:
    *_, last = await broker.read_output(request_id)
    assert last.outcome is not None
    return last.outcome.name
