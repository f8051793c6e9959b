"""A worker that speaks the protocol through the broker and emits what a script says, without any model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from quire.shared.protocol.broker import Broker, Claim, QueueReader, StepCommit, new_id
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome, PromptReport, StepItem, WorkerCard
from quire.shared.protocol.sampling_params import MAX_CHOICES
from quire.shared.redis.clients import blocking_client, command_client

# The steps of one request: the deltas of each, and the outcome that ends it.
Steps = AsyncIterator[tuple[tuple[Delta, ...], Outcome | None]]
Script = Callable[[GenerationRequest], Steps]


@dataclass
class FakeWorker:
    """Runs the same script for every request it claims."""

    redis_url: str
    lane: str
    script: Script
    max_model_len: int = 4096
    max_num_seqs: int = 64
    vocab_size: int = 100_000
    worker_id: str = field(default_factory=new_id)
    claimed: list[GenerationRequest] = field(default_factory=list)
    cancelled: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    steps: dict[str, int] = field(default_factory=dict)
    # Makes the report about the prompt, which the first item carries.
    report: Callable[[GenerationRequest], PromptReport | None] = lambda request: None
    weights_digest: str = ""
    no_images: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeWorker]:
        commands, blocking = command_client(self.redis_url), blocking_client(self.redis_url)
        self.broker = Broker(commands, self.lane)
        await self.broker.create_groups()
        await self.beat()
        task = asyncio.create_task(self._consume(QueueReader(blocking, self.lane, self.worker_id)))
        try:
            yield self
        finally:
            self._stopping = True  # cancelling a blocking read would lose its reply
            await task
            for request_task in self._tasks:
                request_task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await blocking.aclose()
            await commands.aclose()

    async def claims(self, count: int) -> None:
        """Wait until that many requests are claimed."""
        async with asyncio.timeout(30):
            while len(self.claimed) < count:  # noqa: ASYNC110 - the tests add to the list
                await asyncio.sleep(0.005)

    async def beat(self) -> None:
        await self.broker.beat(
            WorkerCard(
                worker_id=self.worker_id,
                incarnation=self.worker_id,
                model=self.lane,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                vocab_size=self.vocab_size,
                eos_token_ids=(0,),
                block_size=16,
                total_blocks=100,
                free_blocks=100,
                running=0,
                waiting=0,
                steps=1,
                weights_digest=self.weights_digest,
                no_images=self.no_images,
            )
        )

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def _consume(self, reader: QueueReader) -> None:
        while not self._stopping:
            for delivery in await reader.read(MAX_CHOICES, 10):
                claim = await self.broker.claim(delivery, self.worker_id, new_id())
                if claim is not None:
                    task = asyncio.create_task(self._run(claim))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _run(self, claim: Claim) -> None:
        try:
            await self._follow_script(claim)
        except Exception as error:  # a failing script must not leave its test waiting
            item = StepItem(claim.request_id, claim.emitted, (), Outcome("error", f"script: {error!r}"))
            await self.broker.commit_step(self.worker_id, [StepCommit(claim.attempt, item)])
            raise

    async def _follow_script(self, claim: Claim) -> None:
        request = GenerationRequest.decode(claim.body)
        self.claimed.append(request)
        start = claim.emitted
        async for deltas, outcome in self.script(request):
            report = None if request.id in self.steps else self.report(request)
            item = StepItem(request.id, start, deltas, outcome, report)
            reply = await self.broker.commit_step(self.worker_id, [StepCommit(claim.attempt, item)])
            self.steps[request.id] = self.steps.get(request.id, 0) + 1
            start = item.end
            if request.id in (*reply.cancelled, *reply.expired):
                name = "cancelled" if request.id in reply.cancelled else "deadline"
                last = StepItem(request.id, start, (), Outcome(name))
                await self.broker.commit_step(self.worker_id, [StepCommit(claim.attempt, last)])
                if name == "cancelled":
                    self.cancelled.put_nowait(request.id)
                return
            if outcome is not None:
                return


def emit(tokens: list[int], reason: str = "length", step: int = 1) -> Script:
    """Return a script that emits these tokens for every choice of every request, `step` tokens at once."""

    async def script(request: GenerationRequest) -> Steps:
        n = request.sampling.n
        for at in range(0, len(tokens), step):
            last = at + step >= len(tokens)
            piece = tuple(tokens[at : at + step])
            deltas = tuple(Delta(choice, piece, reason if last else None) for choice in range(n))
            yield deltas, Outcome(reason) if last else None

    return script


def endless(token: int) -> Script:
    """Return a script that emits `token` without end."""

    async def script(request: GenerationRequest) -> Steps:
        while True:
            yield tuple(Delta(choice, (token,)) for choice in range(request.sampling.n)), None

    return script
