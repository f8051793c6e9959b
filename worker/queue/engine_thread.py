"""The engine's thread: takes commands, emits commits, and ticks to show that it makes progress.

The engine is only touched on this thread, between steps. Other threads read a few numbers: `free_rows`, `displaceable`,
`ticks`, `status`. A request that the engine cannot take, or whose step fails, ends with the outcome `error`. If the
device is lost the thread ends, and other workers continue its requests. Each item leaves with the token of the attempt
that computed it, so it cannot be mistaken for an item of another attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from quire.shared.protocol.broker import ComputedTokens, StepCommit
from quire.shared.protocol.messages import GenerationRequest, Outcome, StepItem
from quire.shared.protocol.states import OutcomeName
from quire.shared.telemetry.prometheus import STEP_S, Fading, Histogram
from quire.worker.engine.engine import Engine
from quire.worker.engine.groups import DEFAULT_PRIORITY
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.sequence import LOWEST_PRIORITY
from quire.worker.queue.executor import NO_PICTURES, Emit, ExecutorStatus

log = logging.getLogger(__name__)

# Interval of the ticks of an idle engine. Far below the time after which a worker counts as stuck.
IDLE_TICK_S = 0.1
# A step that takes longer may never end, so no requests are claimed during it: other workers can run them.
LONG_STEP_S = 1.0
# Half-life of the longest step time. A worker counts as live for three times the longest step time. Without the decay,
# one step of a minute, on a machine that slept, would keep that limit at three minutes until the worker ends.
SLOW_STEP_HALF_LIFE_S = 600.0

T = TypeVar("T")


class EngineGone(RuntimeError):
    """The engine's thread has ended and answers no calls."""


class EngineThread(threading.Thread):
    """Runs an engine until `stop`.

    `emit(commits, computed)` is called on this thread after every step, with or without results. computed: of requests
    that emit nothing before their end. `ended()` is called when the thread ends; `failure` is then the cause, or None
    after `stop`.
    """

    def __init__(
        self,
        engine: Engine,
        emit: Emit,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._emit = emit
        self._ended = ended
        self._attempts: dict[str, str] = {}
        self._computed: list[ComputedTokens] = []
        self._commands: deque[Callable[[], StepItem | None]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[Engine], Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._is_over = False
        # Total rows of added requests, counted on the caller's thread, and of those that the engine has taken, counted
        # on this thread. The difference is the number of rows of requests on their way.
        self._rows_added = 0
        self._rows_taken = 0
        self._rows_being_taken = 0
        self._free_rows = engine.groups.num_free_rows()
        self._displaceable = (0, 0)
        self._slowest_step = Fading(SLOW_STEP_HALF_LIFE_S)
        self.failure: BaseException | None = None
        # Time from the end of a step to the beginning of the next while there is work: commands, and waiting for the
        # interpreter's lock. And the total time without work.
        self.gaps = Histogram(STEP_S)
        self.idle_s = 0.0
        self._stepped_at = 0.0
        self.ticks = 0
        self.ticked_at = time.monotonic()
        self.status = self._read_status()

    @property
    def free_rows(self) -> int:
        """Sequences that the engine can start now, less those of requests on their way; 0 during a long step."""
        return 0 if self._is_long else self._free_rows - self._rows_on_their_way

    @property
    def displaceable(self) -> tuple[int, int]:
        """Rows that requests of the first and of the second priority class can displace, less those of requests on
        their way; 0 during a long step."""
        first, second = (0, 0) if self._is_long else self._displaceable
        return max(0, first - self._rows_on_their_way), max(0, second - self._rows_on_their_way)

    @property
    def stranded(self) -> list[tuple[str, str]]:
        """Nothing: an engine takes all of its requests further."""
        return []

    @property
    def _rows_on_their_way(self) -> int:
        return self._rows_added - self._rows_taken

    @property
    def _is_long(self) -> bool:
        return time.monotonic() - self.ticked_at > LONG_STEP_S

    def add(
        self,
        request: GenerationRequest,
        attempt: str,
        earlier: tuple[StepItem, ...],
        priority: int = DEFAULT_PRIORITY,
        pictures: Mapping[str, bytes] = NO_PICTURES,
    ) -> None:
        """Start a request after the items that earlier attempts emitted. An older attempt here is dropped."""
        self._rows_added += request.rows
        self._post(lambda: self._add(request, attempt, earlier, priority, pictures))
        if priority < LOWEST_PRIORITY:
            self._engine.interrupt.request()

    def prepare(self, request: GenerationRequest) -> None:
        """Compile the grammar of a request, which takes long. Call it on another thread than the engine's."""
        if self._engine.grammars is None:
            return
        with suppress(Exception):  # the engine meets the same error, and ends the request with it
            self._engine.grammars.matcher(request.sampling.grammar)

    def finish(self, request_id: str, outcome: str) -> None:
        """End a request with an outcome. A request that still runs emits its last item."""
        self._post(lambda: self._engine.finish(request_id, outcome))

    def drop(self, request_id: str, attempt: str) -> None:
        """Drop an attempt that is over, without an item."""
        self._post(lambda: self._drop(request_id, attempt))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function(engine)` on the engine's thread between two steps.

        `function` must be quick and change nothing.
        The future holds what the function returns or raises, or EngineGone if the thread has ended. A call whose future
        has been cancelled is skipped.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._is_over:
                future.set_exception(EngineGone("the engine's thread has ended"))
            else:
                self._calls.append((future, function))
                self._wake.notify()
        return future

    def stop(self) -> None:
        """End the thread after the step in progress."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            log.critical("the engine's thread failed", exc_info=error)
            self.failure = error
        finally:
            with self._wake:
                self._is_over = True
            while self._calls:
                future, _ = self._calls.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineGone("the engine's thread has ended"))
            self._ended()

    def _run(self) -> None:
        while not self._stopping:
            self._engine.interrupt.clear()  # before the commands are read: a later one interrupts the step again
            commits = self._run_commands()
            self._answer_calls()
            stepped = self._engine.has_work
            if stepped:
                items = self._step()
                self._note_computed()
                commits += map(self._commit, items)
            self.ticks += 1
            self.ticked_at = time.monotonic()
            self.status = self._read_status()
            self._update_capacity()
            if commits or stepped:
                computed, self._computed = self._computed, []
                self._emit(commits, computed)
            if self._engine.has_work:
                continue
            self._stepped_at = 0.0
            if not self._engine.prepare():
                with self._wake:
                    if not self._commands and not self._calls and not self._stopping:
                        idle_since = time.perf_counter()
                        self._wake.wait(IDLE_TICK_S)
                        self.idle_s += time.perf_counter() - idle_since

    def _post(self, command: Callable[[], StepItem | None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run_commands(self) -> list[StepCommit]:
        commits: list[StepCommit] = []
        if not self._commands:
            return commits
        while self._commands:
            if item := self._commands.popleft()():
                self._note_computed()
                commits.append(self._commit(item))  # at once: the next command may start another attempt
        # The order matters to readers on other threads: `free_rows` is never larger than it should be.
        self._update_capacity()
        self._rows_taken += self._rows_being_taken
        self._rows_being_taken = 0
        return commits

    def _update_capacity(self) -> None:
        groups = self._engine.groups
        self._free_rows = groups.num_free_rows()
        self._displaceable = (groups.num_preemptible_rows(0), groups.num_preemptible_rows(1))

    def _answer_calls(self) -> None:
        while self._calls:
            future, function = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

    def _add(
        self,
        request: GenerationRequest,
        attempt: str,
        earlier: tuple[StepItem, ...],
        priority: int,
        pictures: Mapping[str, bytes],
    ) -> StepItem | None:
        self._rows_being_taken += request.rows
        self._engine.drop(request.id)
        self._attempts[request.id] = attempt
        try:
            self._engine.add(request, earlier, priority, pictures=pictures)
            return None
        except RequestRefused as error:
            detail = str(error)
        except Exception:
            log.exception("the engine could not take request %s", request.id, extra={"request_id": request.id})
            detail = "the engine could not take the request"
        return StepItem(request.id, earlier[-1].end if earlier else 0, (), Outcome(OutcomeName.ERROR, detail))

    def _drop(self, request_id: str, attempt: str) -> None:
        if self._attempts.get(request_id) == attempt:
            del self._attempts[request_id]
            self._engine.drop(request_id)

    def _step(self) -> list[StepItem]:
        started = time.monotonic()
        if self._stepped_at:
            self.gaps.observe(started - self._stepped_at)
        try:
            return self._engine.step()
        except Exception:
            log.exception("step failed with %d requests", len(self._engine.requests))
            # Raises if the device is lost: the thread and the process end, and other workers continue the requests.
            self._engine.runner.check()
            # The cause is a defect or exhausted memory, and the request to blame is unknown. All running requests end
            # with an error, which frees all blocks, and the engine continues with other requests.
            return self._engine.fail("the engine failed in a step of this request")
        finally:
            ended = time.monotonic()
            self._slowest_step.see(ended - started, ended)
            self._stepped_at = ended

    def _note_computed(self) -> None:
        """Note the tokens computed for requests that emit nothing before their end. Call it before `_commit`."""
        self._computed += [
            ComputedTokens(request_id, self._attempts[request_id], count)
            for request_id, count in self._engine.take_computed()
            if request_id in self._attempts
        ]

    def _commit(self, item: StepItem) -> StepCommit:
        attempt = self._attempts.pop(item.request_id) if item.outcome else self._attempts[item.request_id]
        return StepCommit(attempt, item)

    def _read_status(self) -> ExecutorStatus:
        groups = self._engine.groups
        return ExecutorStatus(
            free_blocks=groups.blocks.num_free,
            running=groups.num_running,
            waiting=groups.num_waiting,
            steps=self._engine.num_steps,
            slowest_step_s=self._slowest_step.at(time.monotonic()),
            pace=self._engine.pace.read(),
        )
