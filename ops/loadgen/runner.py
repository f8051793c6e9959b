"""Sends the load in blocks to each server, and measures the lateness of its own timers meanwhile.

With two servers, both get the same requests in every block. Even blocks go to the first server first, odd blocks to the
second, so that a machine whose speed drifts favours neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import aiohttp

from quire.ops.loadgen.client import RequestRecord, clock, stream
from quire.ops.loadgen.plan import Plan
from quire.ops.loadgen.prompts import Prompts
from quire.ops.loadgen.server import MeasuredServer
from quire.ops.loadgen.shapes import arrivals, lengths
from quire.shared.process.tasks import end_tasks

LAG_INTERVAL_S = 0.01
REDRAW_S = 0.1
# Up to this number, the requests of a block are made before the block starts; more are made one by one.
MOST_PREPARED = 5000


@dataclass(slots=True)
class Block:
    """A part of the run at one server. Times are in seconds of the client's clock."""

    server: int
    index: int
    started: float = 0.0
    ended: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)


@dataclass(slots=True)
class ScheduledRequest:
    """A request that is ready to be sent, `at_s` seconds after the start of its block."""

    record: RequestRecord
    body: bytes
    at_s: float


@dataclass
class Run:
    """A run and all its measurements.

    lag_s: lateness of the client's timers in seconds. sent, ended, failed: counters, updated during the run.
    """

    plan: Plan
    servers: list[MeasuredServer]
    prompts: Prompts
    context: int | None
    blocks: list[Block] = field(default_factory=list)
    lag_s: array[float] = field(default_factory=lambda: array("d"))
    cut_lengths: int = 0
    sent: int = 0
    ended: int = 0
    failed: int = 0
    stopped: bool = False
    started: float = 0.0

    def works(self, server: MeasuredServer, block: int, warmup: bool = False) -> Iterator[ScheduledRequest]:
        """Yield the requests of a block, equal for each server; endless if the plan has no number of requests."""
        plan = self.plan
        seed = f"{plan.seed} {'warmup' if warmup else block}"
        count = None if warmup else plan.block_requests(block)
        times = arrivals(count, plan.rate, plan.burstiness, seed) if count and plan.rate is not None else None
        draw = random.Random(f"prompts {seed}")
        for index, (prompt, answer) in enumerate(lengths(plan.shape, count, seed)):
            prompt_tokens, answer_tokens = self.fit(prompt, answer)
            if server is self.servers[0] and not warmup:
                self.cut_lengths += (prompt_tokens, answer_tokens) != (prompt, answer)
            body = server.body(self.prompts.make(prompt_tokens, draw), answer_tokens)
            yield ScheduledRequest(
                RequestRecord(index, prompt_tokens, answer_tokens), body, times[index] if times else 0.0
            )

    def fit(self, prompt: int, answer: int) -> tuple[int, int]:
        """Cut the lengths to the context. If both are too long, each gets half of the context."""
        if self.context is None:
            return prompt, answer
        prompt = min(prompt, max(self.context // 2, self.context - answer))
        return prompt, min(answer, self.context - prompt)

    async def warm_up(self, session: aiohttp.ClientSession, requests: int) -> None:
        """Send requests to each server that are not measured, with the concurrency of the load."""
        for server in self.servers:
            gate = asyncio.Semaphore(self.plan.concurrency or requests or 1)

            async def send(
                work: ScheduledRequest, server: MeasuredServer = server, gate: asyncio.Semaphore = gate
            ) -> None:
                async with gate:
                    await stream(session, server.address, work.body, work.record)

            await asyncio.gather(*(send(work) for work in islice(self.works(server, 0, warmup=True), requests)))

    async def measure(self, session: aiohttp.ClientSession, show: Callable[[Run], None] | None = None) -> None:
        """Run all blocks. The first Ctrl-C ends the run early and keeps its results; a second ends the command."""
        loop = asyncio.get_running_loop()
        current: asyncio.Task[None] | None = None

        def stop() -> None:
            self.stopped = True
            loop.remove_signal_handler(signal.SIGINT)
            if current is not None:
                current.cancel()

        loop.add_signal_handler(signal.SIGINT, stop)
        helpers = [asyncio.create_task(self._watch_lag())]
        if show is not None:
            helpers.append(asyncio.create_task(self._redraw(show)))
        self.started = clock()
        try:
            for index in range(self.plan.rounds):
                order = range(len(self.servers))
                for server in order if index % 2 == 0 else reversed(order):
                    if self.stopped:
                        return
                    current = asyncio.create_task(self._block(session, server, index))
                    with contextlib.suppress(asyncio.CancelledError):
                        await current
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            await end_tasks(*helpers)

    async def _block(self, session: aiohttp.ClientSession, number: int, index: int) -> None:
        server, plan = self.servers[number], self.plan
        works = self.works(server, index)
        count = plan.block_requests(index)
        if count is not None and count <= MOST_PREPARED:
            works = iter(list(works))  # made before the block starts
        block = Block(number, index, clock())
        self.blocks.append(block)
        try:
            if plan.concurrency is not None:
                await self._closed(session, server, block, works)
            else:
                await self._open(session, server, block, works)
        finally:
            block.ended = clock()

    @property
    def now(self) -> float:
        return clock()

    async def _closed(
        self, session: aiohttp.ClientSession, server: MeasuredServer, block: Block, works: Iterator[ScheduledRequest]
    ) -> None:
        end = block.started + (self.plan.block_s or math.inf)

        async def one_after_the_other() -> None:
            while clock() < end and (work := next(works, None)):
                work.record.due = clock()
                await self._send(session, server, block, work)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.concurrency or 1):
                group.create_task(one_after_the_other())

    async def _open(
        self, session: aiohttp.ClientSession, server: MeasuredServer, block: Block, works: Iterator[ScheduledRequest]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for work in works:
                work.record.due = block.started + work.at_s
                wait_s = work.record.due - clock()
                if wait_s > 0:  # the timers of the event loop have a resolution of a millisecond
                    await asyncio.sleep(wait_s)
                group.create_task(self._send(session, server, block, work))

    async def _send(
        self, session: aiohttp.ClientSession, server: MeasuredServer, block: Block, work: ScheduledRequest
    ) -> None:
        block.records.append(work.record)
        self.sent += 1
        try:
            await stream(session, server.address, work.body, work.record)
        finally:
            self.ended += 1
            self.failed += not work.record.ok

    async def _watch_lag(self) -> None:
        while True:
            before = clock()
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lag_s.append(max(0.0, clock() - before - LAG_INTERVAL_S))

    async def _redraw(self, show: Callable[[Run], None]) -> None:
        while True:
            show(self)
            await asyncio.sleep(REDRAW_S)
