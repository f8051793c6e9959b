"""What every experiment is given: how much to do, with which seed, on how many processes, and where to say so."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from quire.ops.local.progress import Progress

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass
class Context:
    """quick: short runs, for tests. folder: for checkpoints that are made on the way; deleted in the end.

    `results` are those of the experiments that were run before, by name.
    """

    quick: bool
    seed: int
    jobs: int
    folder: Path
    progress: Progress
    name: str = ""
    results: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """What is going on now."""
        self.progress.update(f"{self.name}: {text}")

    def map(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """The results of a function of this package over jobs, in order, on several processes."""
        self.say(f"0 of {len(jobs)}")
        results: dict[int, Result] = {}
        if self.jobs == 1:
            for index, job in enumerate(jobs):
                results[index] = function(job)
                self.say(f"{index + 1} of {len(jobs)}")
        else:
            with multiprocessing.get_context("spawn").Pool(min(self.jobs, len(jobs)), _begin) as pool:
                for index, result in pool.imap_unordered(_Numbered(function), list(enumerate(jobs))):
                    results[index] = result
                    self.say(f"{len(results)} of {len(jobs)}")
        return [results[index] for index in range(len(jobs))]


@dataclass(frozen=True)
class _Numbered:
    """Carries the place of a job along; a class, because processes are sent it by name."""

    function: Callable[[Any], Any]

    def __call__(self, job: tuple[int, Any]) -> tuple[int, Any]:
        return job[0], self.function(job[1])


def _begin() -> None:
    """In each process: Ctrl-C is for the parent, and the simulations are single threads."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
