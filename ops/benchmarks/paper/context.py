"""The arguments of every experiment: its size, its seed, the number of processes, and the progress output."""

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
        """Show the current activity."""
        self.progress.update(f"{self.name}: {text}")

    def map(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """Call a function of this package for each job, on several processes. Return the results in order."""
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
    """Calls the function and returns the index of the job, too. A class can be pickled for other processes."""

    function: Callable[[Any], Any]

    def __call__(self, job: tuple[int, Any]) -> tuple[int, Any]:
        return job[0], self.function(job[1])


def _begin() -> None:
    """Initialise a process: it ignores Ctrl-C, which the parent handles, and uses a single thread."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
