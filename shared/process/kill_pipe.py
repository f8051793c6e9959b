"""The pipe through which a gateway has `quire serve` kill one of its workers: one line for each, the worker's id.

Only a process that has inherited the pipe can ask for it, and only for the workers that `quire serve` has started.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping
from contextlib import suppress

# The environment variable with the descriptor of the writing end and the ids of the workers, as JSON.
KILL_PIPE = "_QUIRE_KILL_PIPE"


class WorkerKiller:
    """The writing end of the pipe. workers: the ids of the workers that can be killed."""

    def __init__(self, descriptor: int, workers: frozenset[str]) -> None:
        self._descriptor = descriptor
        self.workers = workers

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> WorkerKiller | None:
        """Return the pipe that the process has inherited; None in a process without one."""
        with suppress(ValueError, KeyError, TypeError):
            given = json.loads(environ[KILL_PIPE])
            return cls(int(given["descriptor"]), frozenset(map(str, given["workers"])))
        return None

    def kill(self, worker_id: str) -> bool:
        """Ask for the death of a worker. Return False if it is none of these workers, or if nobody reads."""
        if worker_id not in self.workers:
            return False
        try:
            # One write: gateways share the pipe, and the kernel does not mix short lines.
            return os.write(self._descriptor, f"{worker_id}\n".encode()) > 0
        except OSError:
            return False


class KillRequests:
    """Both ends of the pipe, in `quire serve`. workers: the ids of its workers."""

    def __init__(self, workers: list[str]) -> None:
        self._workers = workers
        self._reading, self.writing = os.pipe()
        for descriptor in (self._reading, self.writing):
            os.set_blocking(descriptor, False)
        self._rest = b""

    @property
    def environ(self) -> dict[str, str]:
        """Return the variable of a child that inherits `writing`."""
        return {KILL_PIPE: json.dumps({"descriptor": self.writing, "workers": self._workers})}

    def read(self, timeout_s: float = 0.0) -> list[str]:
        """Return the ids of the workers to kill, after `timeout_s` at the latest. An unknown id is left out."""
        select.select([self._reading], [], [], timeout_s)
        with suppress(BlockingIOError):
            while data := os.read(self._reading, 4096):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        found = [line.decode(errors="replace") for line in lines]
        return [worker_id for worker_id in dict.fromkeys(found) if worker_id in self._workers]
