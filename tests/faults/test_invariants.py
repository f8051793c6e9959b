"""The check of invariants detects a violation of each invariant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from quire.shared.redis.clients import blocking_client, command_client
from tests.support.faults.stack import FaultStack

GATEWAY = "g"


async def serve(stack: FaultStack) -> str:
    """Serve one request through the broker from submission to end, in two steps of one token each. Returns its id."""
    url = stack.redis_server.url
    commands, blocking = command_client(url), blocking_client(url)
    try:
        broker, reader = Broker(commands, stack.keys.lane), QueueReader(blocking, stack.keys.lane, "a")
        await broker.create_groups()
        await broker.submit(new_id(), b"", Admission(gateway=GATEWAY, cost=1, bounds=QueueBounds(10, 10)))
        (delivery,) = await reader.read(1, 0)
        claim = await broker.claim(delivery, "a", new_id())
        assert claim is not None
        request_id, attempt = claim.request_id, claim.attempt
        first = StepItem(request_id, 0, (Delta(0, (5,)),))
        last = StepItem(request_id, 1, (Delta(0, (6,), "stop"),), Outcome("stop"))
        for item in (first, last):
            await broker.commit_step("a", [StepCommit(attempt, item)])
        return request_id
    finally:
        await commands.aclose()
        await blocking.aclose()


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[FaultStack]:
    stack = FaultStack(tmp_path_factory.mktemp("invariants"), long_model)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture
def served(module_stack: FaultStack) -> tuple[FaultStack, str]:
    """A stack without processes in which one request has completed, and the request's id."""
    module_stack.redis.flushall()
    return module_stack, asyncio.run(serve(module_stack))


def write(stack: FaultStack, request_id: str, start: int, outcome: Outcome | None, entry: str) -> None:
    item = StepItem(request_id, start, (Delta(0, (7,)),), outcome)
    stack.redis.xadd(stack.keys.output(request_id), {"item": item.encode()}, id=entry)


BROKEN: dict[str, Callable[[FaultStack, str], object]] = {
    "I1: accepted and without outcome": lambda s, i: s.redis.hincrby(s.keys.totals, "accepted", 1),
    "I1: counted twice": lambda s, i: s.redis.hincrby(s.keys.totals, "length", 1),
    "I1: of another outcome": lambda s, i: s.redis.hset(s.keys.request(i), "outcome", "length"),
    "I1: not done": lambda s, i: s.redis.hset(s.keys.request(i), "state", "running"),
    "I2: a token is missing": lambda s, i: s.redis.xdel(s.keys.output(i), "1-0"),
    "I2: the end is missing": lambda s, i: s.redis.xdel(s.keys.output(i), "2-1"),
    "I4: a token behind the end": lambda s, i: write(s, i, 2, None, "3-0"),
    "I4: a token twice": lambda s, i: write(s, i, 1, None, "2-2"),
    "I4: two ends": lambda s, i: write(s, i, 2, Outcome("stop"), "3-1"),
    "I5: a request for ever": lambda s, i: s.redis.persist(s.keys.request(i)),
    "I5: a log for ever": lambda s, i: s.redis.persist(s.keys.output(i)),
    "I5: a key of nobody": lambda s, i: s.redis.set(s.keys.prefix + "left", 1),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_found(served: tuple[FaultStack, str], damage: Callable[[FaultStack, str], object]) -> None:
    stack, request_id = served
    stack.assert_invariants()
    damage(stack, request_id)
    with pytest.raises(AssertionError):
        stack.assert_invariants()


def test_what_waits_or_is_pending_is_not_drained(served: tuple[FaultStack, str]) -> None:
    stack, _ = served
    assert stack.is_drained()
    stack.redis.hincrby(stack.keys.load, "tokens", 1)
    assert not stack.is_drained()
    stack.redis.hincrby(stack.keys.load, "tokens", -1)
    stack.redis.xadd(stack.keys.queue(), {"id": "x", "cost": 1})
    assert not stack.is_drained()
