"""The seam between the queue and what computes: an engine on its thread, or the clients of other engines' servers.

Consumer, committer and watchdog know nothing but this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from quire.shared.protocol.broker import ComputedTokens, StepCommit
from quire.shared.protocol.messages import GenerationRequest, StepItem
from quire.shared.protocol.pace import UNKNOWN_PACE, Pace

# Takes the results of a step. The computed tokens are of requests that emit nothing before their end.
Emit = Callable[[list[StepCommit], list[ComputedTokens]], None]
# The pictures of a request without images.
NO_PICTURES: Mapping[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """Figures of an executor between two steps."""

    free_blocks: int
    running: int
    waiting: int
    steps: int
    slowest_step_s: float
    pace: Pace = UNKNOWN_PACE


class Executor(Protocol):
    """Runs claimed requests until `stop`, and emits their items with the tokens of their attempts.

    `emit` is called after every step with or without results, at least every few milliseconds while requests run: each
    commit asks for cancellations.
    """

    @property
    def failure(self) -> BaseException | None:
        """Why the executor has ended without `stop`."""
        ...

    @property
    def ticks(self) -> int:
        """A number that grows while the executor makes progress, idle or not. A worker that hangs loses its leases."""
        ...

    @property
    def status(self) -> ExecutorStatus: ...

    @property
    def free_rows(self) -> int:
        """Sequences that can start now."""
        ...

    @property
    def displaceable(self) -> tuple[int, int]:
        """Rows that requests of the first and of the second priority class can displace."""
        ...

    @property
    def stranded(self) -> list[tuple[str, str]]:
        """Requests that cannot go on here now, each with its attempt token: the service hands them to other workers."""
        ...

    def add(
        self,
        request: GenerationRequest,
        attempt: str,
        earlier: tuple[StepItem, ...],
        priority: int = ...,
        pictures: Mapping[str, bytes] = ...,
    ) -> None:
        """Start a request after the items that earlier attempts emitted. An older attempt here is dropped.

        pictures: the files of its images, by digest.
        """
        ...

    def prepare(self, request: GenerationRequest) -> None:
        """Do what takes long before a request with a grammar starts. Called on a thread of its own."""
        ...

    def finish(self, request_id: str, outcome: str) -> None:
        """End a request with an outcome. A request that still runs emits its last item."""
        ...

    def drop(self, request_id: str, attempt: str) -> None:
        """Drop an attempt that is over, without an item."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """End after the step in progress."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Block the calling thread until the executor has ended."""
        ...
