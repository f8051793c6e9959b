"""Ends the process when its engine makes no progress, so that a supervisor starts it again."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from quire.worker.interpreter import FAILED

if TYPE_CHECKING:
    from quire.worker.queue.executor import Executor

log = logging.getLogger(__name__)


class Watchdog(threading.Thread):
    """Watches the engine on a thread of its own, because a step that hangs can block the event loop too."""

    def __init__(self, engine: Executor, limit_s: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._engine = engine
        self._limit_s = limit_s
        self._stopped = threading.Event()

    def start(self) -> None:
        if self._limit_s > 0:
            super().start()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        # Time is counted in checks, not by the clock: a process that was suspended must not end itself when it resumes.
        pause_s = min(1.0, self._limit_s / 4)
        seen, still_s = -1, 0.0
        while not self._stopped.wait(pause_s):
            ticks = self._engine.ticks
            seen, still_s = ticks, still_s + pause_s if ticks == seen else 0.0
            if still_s > self._limit_s:
                log.critical("the engine has not moved for %.0f s: the worker ends itself (see --watchdog-s)", still_s)
                logging.shutdown()
                os._exit(FAILED)
