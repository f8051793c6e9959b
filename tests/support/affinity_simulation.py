"""Many workers that serve conversations, in simulated time: the scripts decide, nothing is computed."""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from quire.shared.protocol.broker import (
    Admission,
    Broker,
    Claim,
    QueueBounds,
    QueueReader,
    StepCommit,
    StreamEntry,
    new_id,
)
from quire.shared.protocol.messages import Delta, Outcome, StepItem, WorkerCard

BOUNDS = QueueBounds(10**6, 10**9)


@dataclass
class Conversation:
    """A conversation of several turns: each has the prompt of the last one as a prefix."""

    name: int
    system: int
    turns: int
    tokens: int


@dataclass
class SimulatedWorker:
    """What a worker runs, has served, and holds."""

    name: str
    reader: QueueReader
    running: int = 0
    served: int = 0
    busy_s: float = 0.0
    cached: dict[object, int] = field(default_factory=dict)


@dataclass
class Result:
    """Requests and request-seconds by worker; first-token times; placements."""

    served: list[int]
    busy_s: list[float]
    first_token_s: list[float]
    placements: dict[str, int]

    @property
    def spread(self) -> tuple[float, float]:
        """The largest load over the mean, in requests and in request-seconds."""
        return (
            max(self.served) * len(self.served) / sum(self.served),
            max(self.busy_s) * len(self.busy_s) / sum(self.busy_s),
        )


class Simulation:
    """Poisson arrivals of conversations at `workers` workers of `rows` rows.

    hot: share of the conversations with the most common instructions. A token of a prompt that is not cached takes
    `prefill_s`, an answer `answer_s` on average, and the next turn comes after `think_s` on average.
    """

    def __init__(self, broker: Broker, workers: int, rows: int, is_affine: bool, seed: int = 1) -> None:
        self.broker = broker
        self.rows = rows
        self.is_affine = is_affine
        self.random = random.Random(seed)
        self.workers = {
            name: SimulatedWorker(name, QueueReader(broker.client, broker.keys.lane, name))
            for name in (f"w{index:02}" for index in range(workers))
        }
        # Workers that wait for requests, in the order in which Redis serves them.
        self.waiting = deque(self.workers)
        self.events: list[tuple[float, int, object]] = []
        self.order = count()
        self.queued = 0
        self.first_token_s: list[float] = []
        self.placements: dict[str, int] = {}
        self.asked: dict[str, tuple[float, Conversation]] = {}
        self.beat_at = 0.0

    async def begin(self) -> None:
        await self.broker.create_groups()
        for worker in self.workers.values():
            await worker.reader.pending()
        await self.beat()

    async def beat(self) -> None:
        """Beat often enough in the time of Redis."""
        self.beat_at = time.monotonic()
        for name in self.workers:
            await self.broker.beat(WorkerCard(name, name * 4, "lane", 100, self.rows, 50, (2,), 16, 10, 5, 0, 0, 7))

    async def run(
        self,
        requests: int,
        rate: float,
        hot: float = 0.5,
        systems: int = 20,
        prefill_s: float = 0.001,
        answer_s: float = 2.0,
        think_s: float = 5.0,
    ) -> Result:
        self.prefill_s, self.answer_s, self.think_s = prefill_s, answer_s, think_s
        now, made, turns = 0.0, 0, 0
        while turns < requests:
            now += self.random.expovariate(rate / 4)
            system = 0 if self.random.random() < hot else self.random.randrange(1, systems)
            conversation = Conversation(made, system, self.random.choice((1, 2, 4, 9)), 0)
            made += 1
            turns += conversation.turns
            self.at(now, conversation)
        while self.events:
            if time.monotonic() - self.beat_at > 1:
                await self.beat()
            now, _, event = heapq.heappop(self.events)
            if isinstance(event, Conversation):
                await self.ask(now, event)
            else:
                worker, claim, conversation = event
                await self.end(now, worker, claim, conversation)
        workers = self.workers.values()
        return Result(
            [worker.served for worker in workers],
            [worker.busy_s for worker in workers],
            self.first_token_s,
            self.placements,
        )

    def at(self, when: float, event: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), event))

    async def ask(self, now: float, conversation: Conversation) -> None:
        request_id = new_id()
        prefixes = (b"c%011d" % conversation.name, b"s%011d" % conversation.system)
        terms = Admission(
            "g", BOUNDS, cost=10, prompt_tokens=10, prefixes=prefixes if self.is_affine else (), left_ms=60_000
        )
        conversation.tokens += 600 if conversation.tokens else 1500
        self.asked[request_id] = (now, conversation)
        submitted = await self.broker.submit(request_id, b"body", terms)
        self.queued += 1
        if submitted.is_left:
            affinity = await self.broker.client.hget(self.broker.keys.request(request_id), "affinity")
            name = (affinity or b"").split(b" ", 2)[2].decode()
            [entry] = await self.workers[name].reader.read(self.rows, 1000)
            await self.start(now, name, entry)
            await self.workers[name].reader.read(0, 0)  # acknowledges what was left to it
        await self.take(now)

    async def take(self, now: float) -> None:
        """Let the workers that wait take requests."""
        while self.queued and self.waiting:
            name = self.waiting.popleft()
            entries = await self.workers[name].reader.read(1, 0)
            self.waiting.append(name)
            for entry in entries:
                await self.start(now, name, entry)
            assert entries

    async def start(self, now: float, name: str, entry: StreamEntry) -> None:
        worker = self.workers[name]
        claim = await self.broker.claim(entry, name, new_id(), name * 4)
        assert claim is not None
        self.queued -= 1
        worker.running += 1
        worker.served += 1
        if claim.placement:
            self.placements[claim.placement] = self.placements.get(claim.placement, 0) + 1
        asked, conversation = self.asked.pop(claim.request_id)
        cached = max(worker.cached.get(conversation.name, 0), worker.cached.get(("system", conversation.system), 0))
        prefill = self.prefill_s * (conversation.tokens - cached)
        worker.cached[conversation.name] = conversation.tokens
        worker.cached[("system", conversation.system)] = 1000
        self.first_token_s.append(now - asked + prefill)
        takes = prefill + self.random.expovariate(1 / self.answer_s)
        worker.busy_s += takes
        if worker.running >= self.rows and name in self.waiting:
            self.waiting.remove(name)
        self.at(now + takes, (name, claim, conversation))

    async def end(self, now: float, name: str, claim: Claim, conversation: Conversation) -> None:
        item = StepItem(claim.request_id, 0, (Delta(0, (1,), "stop"),), Outcome("stop"))
        await self.broker.commit_step(name, [StepCommit(claim.attempt, item)])
        worker = self.workers[name]
        worker.running -= 1
        if name not in self.waiting:
            self.waiting.append(name)
        conversation.turns -= 1
        if conversation.turns:
            self.at(now + self.random.expovariate(1 / self.think_s), conversation)
        await self.take(now)
