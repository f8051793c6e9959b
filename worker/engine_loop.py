"""The engine's own thread: commands in, step items out, and a tick that shows progress.

Everything that touches the engine happens on this thread, between steps. Other threads see three numbers: `room`,
`ticks` and `status`. A request that the engine cannot take, or a step that fails, ends as an item with the outcome
`error`: nobody waits for ever.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.messages import GenerationRequest, Outcome, StepItem
from worker.engine.engine import Engine
from worker.engine.scheduler import RequestTooLarge

log = logging.getLogger(__name__)

# How often an idle engine shows that it lives. Far below the time after which a worker counts as stuck.
IDLE_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A reading of the engine between two steps."""

    free_blocks: int
    running: int
    waiting: int
    steps: int


class EngineLoop(threading.Thread):
    """Runs an engine until `stop`. `emit(items)` is called on this thread after every step, with or without results."""

    def __init__(self, engine: Engine, emit: Callable[[list[StepItem]], None]) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._emit = emit
        self._commands: deque[Callable[[], StepItem | None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._taken = 0  # adds that are not in the engine yet
        self._room = engine.room()
        self.ticks = 0
        self.status = self._read_status()

    @property
    def room(self) -> int:
        """Requests that fit now, those on their way counted in."""
        return self._room - self._taken

    def add(self, request: GenerationRequest, earlier: tuple[StepItem, ...]) -> None:
        """Start a request, behind what earlier attempts emitted."""

        def command() -> StepItem | None:
            try:
                self._engine.add(request, earlier)
                return None
            except RequestTooLarge as error:
                start = earlier[-1].end if earlier else 0
                return StepItem(request.id, start, (), Outcome("error", str(error)))
            finally:
                self._taken -= 1

        self._taken += 1
        self._post(command)

    def finish(self, request_id: str, outcome: str) -> None:
        """End a request with an outcome; its last item is emitted if it still ran."""
        self._post(lambda: self._engine.finish(request_id, outcome))

    def drop(self, request_id: str) -> None:
        """Forget a request that is somebody else's now."""
        self._post(lambda: self._engine.drop(request_id))

    def stop(self) -> None:
        """End the thread after the step in progress."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        while not self._stopping:
            items = self._obey()
            stepped = self._engine.has_work
            if stepped:
                items += self._step()
            self.ticks += 1
            self.status = self._read_status()
            self._room = self._engine.room()
            if items or stepped:
                self._emit(items)
            if not self._engine.has_work:
                with self._wake:
                    if not self._commands and not self._stopping:
                        self._wake.wait(IDLE_TICK_S)

    def _post(self, command: Callable[[], StepItem | None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _obey(self) -> list[StepItem]:
        items = []
        while self._commands:
            if item := self._commands.popleft()():
                items.append(item)
        return items

    def _step(self) -> list[StepItem]:
        try:
            return self._engine.step()
        except Exception:
            # A defect or exhausted memory. Which request is to blame is not known: all that run end with an error,
            # and the engine, whose blocks are all free again, goes on with the next.
            log.exception("step failed; %d running requests end with an error", len(self._engine.groups))
            detail = "the engine failed in a step of this request"
            ended = [self._engine.finish(request_id, "error", detail) for request_id in list(self._engine.groups)]
            return [item for item in ended if item]

    def _read_status(self) -> EngineStatus:
        scheduler = self._engine.scheduler
        return EngineStatus(
            scheduler.blocks.num_free, len(scheduler.running), len(scheduler.waiting), self._engine.num_steps
        )
