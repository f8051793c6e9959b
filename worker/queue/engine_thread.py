"""The engine's own thread: commands in, commits out, and a tick that shows progress.

Everything that touches the engine happens on this thread, between steps. Other threads see a few numbers: `room`,
`ticks`, `status`. What the engine cannot take, or a step that fails, ends as an item with the outcome `error`: nobody
waits for ever. Where the device is lost the thread ends, and its requests go on elsewhere. Each item leaves with the
attempt under which it was computed, so that it can never pass for another attempt's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.shared.broker import StepCommit
from quire.shared.messages import GenerationRequest, Outcome, StepItem
from quire.shared.telemetry.prometheus import STEP_S, Fading, Histogram
from quire.worker.engine.engine import Engine
from quire.worker.engine.groups import DEFAULT_PRIORITY
from quire.worker.engine.limits import RequestRefused

log = logging.getLogger(__name__)

# How often an idle engine shows that it lives. Far below the time after which a worker counts as stuck.
IDLE_TICK_S = 0.1
# A step that takes longer may never end: what is not read meanwhile others can run, and it dies with nobody.
LONG_STEP_S = 1.0
# A slow step counts for half after so long. A worker is live for three of its slowest steps, and one that took a
# minute, since the machine slept, would make three minutes of that for ever.
SLOW_STEP_HALF_LIFE_S = 600.0

T = TypeVar("T")


class EngineGone(RuntimeError):
    """The engine's thread has ended: it answers no more."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A reading of the engine between two steps."""

    free_blocks: int
    running: int
    waiting: int
    steps: int
    slowest_step_s: float


class EngineThread(threading.Thread):
    """Runs an engine until `stop`.

    `emit(commits)` is called on this thread after every step, with or without results; `ended()` when the thread ends,
    `failure` then says why if that was not `stop`.
    """

    def __init__(self, engine: Engine, emit: Callable[[list[StepCommit]], None], ended: Callable[[], None]) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._emit = emit
        self._ended = ended
        self._attempts: dict[str, str] = {}
        self._commands: deque[Callable[[], StepItem | None]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[Engine], Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._is_over = False
        # Rows that are asked for, counted on the caller's thread, and those that the engine knows of, counted on this.
        self._asked = 0
        self._known = 0
        self._adding = 0
        self._room = engine.groups.num_free_rows()
        self._displaceable = (0, 0)
        self._slowest_step = Fading(SLOW_STEP_HALF_LIFE_S)
        self.failure: BaseException | None = None
        # From the end of a step to the beginning of the next while there is work: commands, and waiting for the
        # interpreter. And seconds without any work.
        self.gaps = Histogram(STEP_S)
        self.idle_s = 0.0
        self._stepped_at = 0.0
        self.ticks = 0
        self.ticked_at = time.monotonic()
        self.status = self._read_status()

    @property
    def room(self) -> int:
        """Rows that are free now, those for requests on their way counted as taken; none during a long step."""
        return 0 if self._is_long else self._room - (self._asked - self._known)

    @property
    def displaceable(self) -> tuple[int, int]:
        """Rows that a request of each class but the last may take from lower ones, less those for requests on their
        way; none during a long step."""
        coming = self._asked - self._known
        most, some = (0, 0) if self._is_long else self._displaceable
        return max(0, most - coming), max(0, some - coming)

    @property
    def _is_long(self) -> bool:
        return time.monotonic() - self.ticked_at > LONG_STEP_S

    def add(
        self, request: GenerationRequest, attempt: str, earlier: tuple[StepItem, ...], priority: int = DEFAULT_PRIORITY
    ) -> None:
        """Start a request, behind what earlier attempts emitted. An older attempt at it here is dropped."""
        self._asked += request.sampling.num_sequences
        self._post(lambda: self._add(request, attempt, earlier, priority))

    def prepare(self, request: GenerationRequest) -> None:
        """Do what a request needs and what takes long, on another thread than the engine's: make its grammar."""
        with suppress(Exception):  # the engine will meet it, too, and say so
            self._engine.grammars.matcher(request.sampling.json_schema)

    def finish(self, request_id: str, outcome: str) -> None:
        """End a request with an outcome; its last item is emitted if it still ran."""
        self._post(lambda: self._engine.finish(request_id, outcome))

    def drop(self, request_id: str, attempt: str) -> None:
        """Forget an attempt that is over."""
        self._post(lambda: self._drop(request_id, attempt))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function(engine)` on the engine's thread between two steps; it must be quick, and change nothing.

        The future has what it returns or raises. A cancelled one is not run any more; EngineGone if the thread has
        ended.
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
        except BaseException as error:  # nothing may end this thread unseen
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
            commits = self._obey()
            self._answer()
            stepped = self._engine.has_work
            if stepped:
                commits += map(self._commit, self._step())
            self.ticks += 1
            self.ticked_at = time.monotonic()
            self.status = self._read_status()
            self._look_for_room()
            if commits or stepped:
                self._emit(commits)
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

    def _obey(self) -> list[StepCommit]:
        commits: list[StepCommit] = []
        if not self._commands:
            return commits
        while self._commands:
            if item := self._commands.popleft()():
                commits.append(self._commit(item))  # now: the next command may bring another attempt
        # The room shrinks before the rows count as known: it is never shown larger than it is.
        self._look_for_room()
        self._known += self._adding
        self._adding = 0
        return commits

    def _look_for_room(self) -> None:
        self._room = self._engine.groups.num_free_rows()
        groups = self._engine.groups
        self._displaceable = (groups.num_preemptible_rows(0), groups.num_preemptible_rows(1))

    def _answer(self) -> None:
        while self._calls:
            future, function = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

    def _add(
        self, request: GenerationRequest, attempt: str, earlier: tuple[StepItem, ...], priority: int
    ) -> StepItem | None:
        self._adding += request.sampling.num_sequences
        self._engine.drop(request.id)
        self._attempts[request.id] = attempt
        try:
            self._engine.add(request, earlier, priority)
            return None
        except RequestRefused as error:
            detail = str(error)
        except Exception:
            log.exception("request %s cannot be taken", request.id, extra={"request_id": request.id})
            detail = "the engine could not take the request"
        return StepItem(request.id, earlier[-1].end if earlier else 0, (), Outcome("error", detail))

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
            # If the device is lost this raises, and ends the thread and the process: others take the requests over.
            self._engine.runner.check()
            # Else a defect or exhausted memory. Which request is to blame is not known: all that run end with an error,
            # and the engine, whose blocks are all free again, goes on with the next.
            return self._engine.fail("the engine failed in a step of this request")
        finally:
            ended = time.monotonic()
            self._slowest_step.see(ended - started, ended)
            self._stepped_at = ended

    def _commit(self, item: StepItem) -> StepCommit:
        attempt = self._attempts.pop(item.request_id) if item.outcome else self._attempts[item.request_id]
        return StepCommit(attempt, item)

    def _read_status(self) -> EngineStatus:
        groups = self._engine.groups
        return EngineStatus(
            free_blocks=groups.blocks.num_free,
            running=groups.num_running,
            waiting=groups.num_waiting,
            steps=self._engine.num_steps,
            slowest_step_s=self._slowest_step.at(time.monotonic()),
        )
