"""Runs one window of a batch: its lines, then the parts of the output files, then the deletion of its lines in Redis.

1. Each line runs until its end; the answers stay in Redis.
2. When all have ended, the answers are read one after the other and written as two objects: one of the output file, and
   one of the error file. A gateway that takes over before the next step finds the same answers in Redis.
3. Redis counts the window and notes the objects, under the fence of the window.
4. The lines are deleted in Redis, and the window is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack

from redis.exceptions import RedisError

from quire.gateway.errors.api_errors import ApiError, BrokerDown
from quire.gateway.features.batches.batch_meter import BatchMeter
from quire.gateway.features.batches.batch_store import LOST, BatchStore, StoredPart, Window, WindowCounts
from quire.gateway.features.batches.files.storage import CHUNK, WHOLE, ObjectWriter, Storage, StorageError
from quire.gateway.features.batches.jsonl import RawLine, read_lines
from quire.gateway.features.batches.line import answer_line, call_id_of, error_line, read_line, unrun_line
from quire.gateway.features.batches.line_run import BatchState, LineLost, LineRunner, RunLine
from quire.gateway.features.batches.slots import LineSlots, Turn
from quire.shared.process.backoff import Backoff

log = logging.getLogger("gateway")

PAUSE_S = (0.2, 5.0)
# Lines that are deleted in Redis at the same time.
DELETIONS = 16
CANCELLED = "The batch was cancelled before this request ended."
EXPIRED = "This request could not be executed before the completion window expired."


class WindowRun:
    """One window at this gateway. completed, failed: lines that have ended so far."""

    def __init__(
        self,
        window: Window,
        state: BatchState,
        store: BatchStore,
        storage: Storage,
        runner: LineRunner,
        slots: LineSlots,
        meter: BatchMeter,
        max_bytes: int,
    ) -> None:
        """max_bytes: of a line."""
        self.window = window
        self.state = state
        self.runner = runner
        self.completed = 0
        self.failed = 0
        # True until the lines are known to `slots`.
        self.is_reading = True
        self._turns: list[Turn] = []
        self._batch = state.batch
        self._store = store
        self._storage = storage
        self._slots = slots
        self._meter = meter
        self._max_bytes = max_bytes
        self._was_begun = window.was_begun

    @property
    def is_idle(self) -> bool:
        """True if lines wait, and none of them is in the queue or at a worker."""
        return bool(self._turns) and not any(turn.has_slot for turn in self._turns)

    async def run(self) -> None:
        """Run the window to its end. After a failure it is tried again, until another gateway takes the window over."""
        backoff = Backoff(*PAUSE_S, jitter=True)
        while True:
            try:
                await self._run()
                return
            except (RedisError, OSError, StorageError, BrokerDown) as error:
                log.warning("window %d of batch %s waits: %s", self.window.index, self._batch.id, error)
            except LineLost:
                log.warning("window %d of batch %s runs again: Redis lost a line", self.window.index, self._batch.id)
            self._was_begun = True
            await asyncio.sleep(backoff.next())

    async def _run(self) -> None:
        window = self.window
        lines = await self._read()
        # The requests of each line as far as they are known, for the deletion.
        requests = dict.fromkeys((line.place.number for line in lines), 0)
        if not window.is_written:
            runs = await self._run_lines(lines)
            requests |= {run.number: run.requests for run in runs}
            lines.clear()
            counts, output, errors = await self._write(runs)
            if await self._store.end(window, counts, output, errors) == LOST:
                return
            self._meter.ended(counts.completed, counts.failed)
        await self._delete(requests)
        await self._store.close(window)

    async def _read(self) -> list[RawLine]:
        window = self.window
        chunks = self._storage.read(self._batch.input, WHOLE, window.begin.offset, window.end.offset)
        return [raw async for raw in read_lines(chunks, self._max_bytes, window.begin) if isinstance(raw, RawLine)]

    # --- 1) run the lines ---------------------------------------------------------------------------------------------

    async def _run_lines(self, lines: list[RawLine]) -> list[RunLine]:
        """Return all lines in order, once they have ended. Raises LineLost."""
        self.completed = self.failed = 0
        tasks: list[asyncio.Task[RunLine]] = []
        self._turns = [self._slots.turn(self._batch.owner, self._batch.id) for _ in lines]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_line(*pair)) for pair in zip(lines, self._turns, strict=True)]
        except* LineLost:
            raise LineLost from None
        finally:
            self._turns = []
        return [task.result() for task in tasks]

    async def _run_line(self, raw: RawLine, turn: Turn) -> RunLine:
        self.is_reading = False
        await turn.wait()
        try:
            line = read_line(raw, self._batch.endpoint, self._max_bytes)
            run = await self.runner.run(line, turn, was_begun=self._was_begun)
        finally:
            turn.give_back()
        if run.has_failed:
            self.failed += 1
        else:
            self.completed += 1
        return run

    # --- 2) write the answers -----------------------------------------------------------------------------------------

    async def _write(self, runs: Iterable[RunLine]) -> tuple[WindowCounts, StoredPart, StoredPart]:
        """Write the answers and the errors, each to an object of its own if there is one."""
        completed = failed = expired = prompt_tokens = completion_tokens = 0
        async with AsyncExitStack() as stack:
            output = _OutputPart(self._storage, stack, self._batch.output, self._name)
            errors = _OutputPart(self._storage, stack, self._batch.errors_file, self._name)
            for run in runs:
                try:
                    if isinstance(run.error, ApiError):
                        raise run.error
                    if run.error is not None:
                        expired += await self._write_unrun(errors, run)
                        failed += 1
                        continue
                    answer = await self.runner.answer(run)
                except BrokerDown:
                    raise
                except ApiError as error:
                    failed += 1
                    if self.runner.stopped_by_end(run, error):
                        expired += await self._write_unrun(errors, run)
                    else:
                        await errors.write(error_line(run.call_id, run.custom_id, error))
                    continue
                completed += 1
                prompt_tokens += answer.prompt_tokens
                completion_tokens += answer.completion_tokens
                for piece in answer_line(run.call_id, run.custom_id, answer.parts):
                    await output.write(piece)
            await output.flush()
            await errors.flush()
        counts = WindowCounts(completed, failed, expired, prompt_tokens, completion_tokens)
        return counts, StoredPart(self._name, output.size), StoredPart(self._name, errors.size)

    @property
    def _name(self) -> str:
        """The name of the objects: a gateway that has lost the window writes other objects."""
        return f"{self.window.index}-{self.window.token}"

    async def _write_unrun(self, errors: _OutputPart, run: RunLine) -> bool:
        """Write the line of a call that the end of the batch stopped. Returns True if the batch had expired."""
        is_expired = not self.state.is_cancelled
        code, message = ("batch_expired", EXPIRED) if is_expired else ("batch_cancelled", CANCELLED)
        await errors.write(unrun_line(run.call_id, run.custom_id, code, message))
        return is_expired

    # --- 3) delete the lines in Redis ---------------------------------------------------------------------------------

    async def _delete(self, requests: dict[int, int]) -> None:
        gateway = self.runner.gateway_of_lane()
        if gateway is None:  # the model has left meanwhile: the rest expires by itself
            return
        lines = [(call_id_of(self._batch.id, number), count) for number, count in requests.items()]
        for at in range(0, len(lines), DELETIONS):
            some = lines[at : at + DELETIONS]
            await asyncio.gather(*(self.runner.delete(call_id, gateway, count) for call_id, count in some))


class _OutputPart:
    """A part of an output file. Its object is made with the first line."""

    def __init__(self, storage: Storage, stack: AsyncExitStack, file_id: str, name: str) -> None:
        self._storage = storage
        self._stack = stack
        self._place = (file_id, name)
        self._writer: ObjectWriter | None = None
        self._waiting: list[str] = []
        self._waiting_size = 0
        self.size = 0

    async def write(self, text: str) -> None:
        self._waiting.append(text)
        self._waiting_size += len(text)
        if self._waiting_size >= CHUNK:
            await self.flush()

    async def flush(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._writer = await self._stack.enter_async_context(self._storage.writing(*self._place))
        data = "".join(self._waiting).encode()
        self._waiting.clear()
        self._waiting_size = 0
        self.size += len(data)
        await self._writer.write(data)
