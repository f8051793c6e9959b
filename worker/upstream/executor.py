"""Runs claimed requests at upstreams, as tasks of the event loop (`worker/queue/executor.py`).

It takes requests only while an upstream is usable: others wait in Redis, where another worker may take them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from tokenizers import Tokenizer

from quire.shared.protocol.broker import StepCommit
from quire.shared.protocol.messages import GenerationRequest, Outcome, StepItem
from quire.shared.protocol.states import OutcomeName
from quire.worker.queue.executor import Emit, ExecutorStatus
from quire.worker.upstream.generation import Generation
from quire.worker.upstream.pool import UpstreamPool
from quire.worker.upstream.requests import static_refusal

log = logging.getLogger(__name__)

# Interval of the ticks: with requests, each one lets a commit ask for cancellations.
TICK_S, IDLE_TICK_S = 0.02, 0.1
# Time without a usable upstream after which running requests are handed to other workers, which may have one.
STRANDED_S = 1.0


class UpstreamExecutor:
    """Runs at most `max_num_seqs` choices at once."""

    def __init__(
        self,
        pool: UpstreamPool,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_num_seqs: int,
        emit: Emit,
        ended: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_num_seqs = max_num_seqs
        # The queue may send a request with more rows than are free: its choices wait here.
        self._rows = asyncio.Semaphore(max_num_seqs)
        self._emit = emit
        self._on_end = ended
        self._stopping = asyncio.Event()
        self._is_over = threading.Event()
        # The attempts that run: tokens and generations by request id, and their tasks.
        self._running: dict[str, tuple[str, Generation]] = {}
        self._tasks: dict[Generation, asyncio.Task[None]] = {}
        self._num_items = 0
        self._task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        self.ticks = 0

    @property
    def _num_rows(self) -> int:
        return sum(generation.request.rows for _, generation in self._running.values())

    @property
    def free_rows(self) -> int:
        return self._max_num_seqs - self._num_rows if self._pool.num_usable else 0

    @property
    def displaceable(self) -> tuple[int, int]:
        return 0, 0

    @property
    def stranded(self) -> list[tuple[str, str]]:
        if self._pool.unusable_s < STRANDED_S:
            return []
        return [(request_id, attempt) for request_id, (attempt, one) in self._running.items() if not one.is_suspect]

    @property
    def status(self) -> ExecutorStatus:
        streams = sum(generation.num_streams for _, generation in self._running.values())
        return ExecutorStatus(
            free_blocks=max(0, self.free_rows),
            running=streams,
            waiting=max(0, self._num_rows - streams),
            steps=self._num_items,
            slowest_step_s=0.0,
        )

    def add(
        self,
        request: GenerationRequest,
        attempt: str,
        earlier: tuple[StepItem, ...],
        priority: int = 0,
        pictures: object = None,
    ) -> None:
        """Start a request after the items that earlier attempts emitted."""
        self._cancel(request.id)
        if fault := self._fault_of(request, earlier):
            self._put(attempt, StepItem(request.id, earlier[-1].end if earlier else 0, (), fault))
            return

        def emit(item: StepItem) -> None:
            self._put(attempt, item)
            if item.outcome is not None and self._running.get(request.id, ("",))[0] == attempt:
                del self._running[request.id]

        generation = Generation(request, earlier, self._tokenizer, self._vocab_size, self._eos_token_ids, emit)
        self._running[request.id] = attempt, generation
        task = self._tasks[generation] = asyncio.create_task(
            generation.run(self._pool, self._rows), name=f"request {request.id}"
        )
        task.add_done_callback(lambda _: self._tasks.pop(generation))

    def prepare(self, request: GenerationRequest) -> None:
        """Do nothing: requests with a grammar are refused."""

    def finish(self, request_id: str, outcome: str) -> None:
        """End a request with an outcome, and its streams at the upstreams."""
        if (generation := self._cancel(request_id)) is not None:
            generation.end(outcome)

    def drop(self, request_id: str, attempt: str) -> None:
        """Drop an attempt that is over, and its streams."""
        if self._running.get(request_id, ("",))[0] == attempt:
            self._cancel(request_id)
            self._running.pop(request_id, None)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="upstreams")

    def stop(self) -> None:
        self._stopping.set()

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._is_over.wait(timeout)

    async def _run(self) -> None:
        watch = asyncio.create_task(self._pool.watch(), name="watch upstreams")
        try:
            while not self._stopping.is_set() and not watch.done():
                self.ticks += 1
                if self._running:
                    self._emit([], [])
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S if self._running else IDLE_TICK_S):
                        await self._stopping.wait()
            if watch.done():
                watch.result()
        except BaseException as error:
            log.critical("the clients of the upstreams failed", exc_info=error)
            self.failure = error
        finally:
            tasks = [watch, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._pool.close()
            self._is_over.set()
            self._on_end()

    def _cancel(self, request_id: str) -> Generation | None:
        """End the streams of a request without an item. Returns it if it was running."""
        _, generation = self._running.get(request_id, ("", None))
        if generation is not None and (task := self._tasks.get(generation)) is not None:
            task.cancel()
        return generation

    def _put(self, attempt: str, item: StepItem) -> None:
        self._num_items += 1
        self._emit([StepCommit(attempt, item)], [])

    def _fault_of(self, request: GenerationRequest, earlier: tuple[StepItem, ...]) -> Outcome | None:
        """Return how a request ends that no upstream can answer; None if one may."""
        if fault := static_refusal(request):
            return Outcome(OutcomeName.ERROR, f"this model is served by another engine's server, without {fault}")
        if request.rows > self._max_num_seqs:
            detail = f"the request has {request.rows} choices, and --max-num-seqs of its worker is {self._max_num_seqs}"
            return Outcome(OutcomeName.ERROR, detail)
        tokens = (*request.prompt, *(token for item in earlier for delta in item.deltas for token in delta.token_ids))
        if not request.prompt or not all(0 <= token < self._vocab_size for token in tokens):
            return Outcome(
                OutcomeName.ERROR, f"the request has token ids outside of a vocabulary of {self._vocab_size}"
            )
        return None
