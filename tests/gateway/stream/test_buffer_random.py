"""Every token arrives once and in order though frames are lost, doubled or late, and client and Redis are slow."""

from __future__ import annotations

import asyncio
import random
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.gateway.stream import buffer as module
from quire.gateway.stream.cursor import weight
from quire.gateway.stream.router import FrameRouter
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import Delta, Outcome, StepItem


class Log:
    """A stand-in for a broker: the logs of running requests, read with a delay. Reads fail while `is_down`."""

    keys = LaneKeys("lane")

    def __init__(self, chance: random.Random, ids: list[str]) -> None:
        self.chance = chance
        self.items: dict[str, list[StepItem]] = {one: [] for one in ids}
        self.is_down = False
        self.client = self

    async def read_output(self, request_id: str, after: int, count: int) -> list[StepItem]:
        await turns(self.chance.choice((0, 1, 3)))
        if self.is_down:
            raise ConnectionError("Redis is away")
        found = [item for item in self.items[request_id] if item.end > after or item.outcome][:count]
        await turns(self.chance.choice((0, 1, 3)))
        return found

    async def hget(self, key: str, name: str) -> bytes:
        return b"running"


@dataclass
class Client:
    """Takes items in a sink and in its task, unless reads are paused. A plain client takes items by `next` instead."""

    buffer: module.OutputBuffer
    is_plain: bool
    open: set[str]
    given: list[StepItem] = field(default_factory=list)
    reads: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> bool:
        if self.open and self.reads.is_set():
            self.note(self.buffer.take())
        return bool(self.open) and self.reads.is_set()

    def note(self, items: list[StepItem]) -> None:
        self.given += items
        self.open.difference_update(item.request_id for item in items if item.outcome)

    async def run(self) -> None:
        if not self.is_plain:
            self.buffer.sink = self.take
        while self.open:
            if self.is_plain:
                self.note(await self.buffer.next())
            else:
                await self.buffer.ready()
                self.take()
            await self.reads.wait()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def made_up(chance: random.Random, request_id: str, choices: int, scored: int | None) -> list[StepItem]:
    """Return the steps of a request, some of them large."""
    items: list[StepItem] = []
    at = 0
    for _ in range(chance.randint(0, 16)):
        deltas, start = [], at
        for choice in range(choices):
            ids = tuple(range(at, at + chance.choice((0, 1, 1, 1, 2, chance.randint(0, 60)))))
            records = None if scored is None else b"".join(struct.pack("<f", -one) + bytes(8 * scored) for one in ids)
            deltas += [Delta(choice, ids, logprobs=records)] if ids else []
            at += len(ids)
        items += [StepItem(request_id, start, tuple(deltas))] if deltas else []
    if items and chance.random() < 0.5:
        return [*items[:-1], items[-1]._replace(outcome=Outcome("stop"))]
    return [*items, StepItem(request_id, at, (), Outcome("stop"))]


@pytest.mark.parametrize("seed", range(150))
async def test_every_token_comes_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(module, "MAX_WAITING", chance.choice((4, 20, 256)))
    monkeypatch.setattr(module, "MAX_TAKEN", chance.choice((6, 40, 1024)))
    ids = [f"r{index}" for index in range(chance.choice((1, 1, 3, 8)))]
    kept = chance.choice((0.85, 1, 1))  # the share of published items that arrive; the log has the lost items
    choices, scored = chance.choice((1, 1, 3)), chance.choice((None, 0, 5))
    steps = {one: made_up(chance, one, choices, scored) for one in ids}
    log: Any = Log(chance, ids)
    router = FrameRouter(log, keepalive_s=60.0)
    buffer = router.open(ids)
    buffer.accept(None, is_logged=False)
    client = Client(buffer, chance.random() < 0.4, set(ids))
    client.reads.set()
    task = asyncio.create_task(client.run())
    largest = {one: max(map(weight, items)) for one, items in steps.items()}
    bound = max(module.MAX_WAITING, module.MAX_TAKEN) + max(largest.values()) + sum(largest.values())
    to_come = {one: list(items) for one, items in steps.items()}
    again: list[StepItem] = []
    while going := [one for one in ids if to_come[one]]:
        what = chance.random()
        if what < 0.5:
            frame = [to_come[one].pop(0) for one in (going if chance.random() < 0.6 else [chance.choice(going)])]
            for item in frame:
                log.items[item.request_id].append(item)
            again += [item for item in frame if chance.random() < 0.05]
            router.feed([item for item in frame if chance.random() < kept], 0.0)
        elif what < 0.55 and again:
            router.feed([again.pop()], 0.0)
        elif what < 0.57 + 0.1 * (kept < 1):
            (client.reads.clear if client.reads.is_set() else client.reads.set)()
        elif what < 0.7 and kept < 1:
            log.is_down = not log.is_down
        elif what < 0.72 and kept < 1:
            buffer.suspect()
        else:
            await turns(chance.choice((1, 1, 1, 2, 5)))
        assert buffer._waiting_tokens == sum(map(weight, buffer._waiting)) <= bound
    log.is_down = False
    client.reads.set()
    await turns(1)
    if not all(cursor.ended for cursor in buffer.cursors.values()):
        buffer.suspect()  # as silence would; unnecessary when all items have arrived
    await asyncio.wait_for(task, 60)

    def flat(items: list[StepItem]) -> list[tuple[int, int]]:
        return [(delta.choice, token) for item in items for delta in item.deltas for token in delta.token_ids]

    def records(items: list[StepItem]) -> bytes:
        return b"".join(delta.logprobs or b"" for item in items for delta in item.deltas)

    for one in ids:
        given = [item for item in client.given if item.request_id == one]
        assert (flat(given), records(given)) == (flat(steps[one]), records(steps[one]))
        assert [item.start for item in given] == [0, *(item.end for item in given[:-1])]
        assert [item.outcome for item in given] == [None] * (len(given) - 1) + [Outcome("stop")]
