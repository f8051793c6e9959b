"""A log of the engine's steps since the last view: their sizes, the blocks that they moved, and one batch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.shared.protocol.views import MAX_MOVES, MAX_STEPS, Move
from quire.worker.engine.step import Step


@dataclass(frozen=True, slots=True)
class RecentSteps:
    """The steps since the last view. `hidden_moves` counts moves that were dropped because there were too many."""

    steps: tuple[tuple[int, int], ...] = ()  # decode tokens and prefill tokens of each
    moves: tuple[Move, ...] = ()
    hidden_moves: int = 0
    # The latest step with a prompt in it, else the latest step.
    shown: Step | None = None


class StepLog:
    """An observer of the engine's steps, at a cost of one or two microseconds each. Use it on the engine's thread."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=MAX_STEPS)
        self._moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self._num_moves = 0
        self._shown: Step | None = None

    def __call__(self, step: Step) -> None:
        """Note a step that has been scheduled."""
        num_prefill = step.num_prefill_tokens
        if step.copies or step.swap_out or step.swap_in:
            for kind, copies in (("swap_out", step.swap_out), ("swap_in", step.swap_in), ("copy", step.copies)):
                self._moves.extend(Move(kind, *copy) for copy in copies)
                self._num_moves += len(copies)
        if num_prefill or step.decodes:
            self._steps.append((len(step.decodes), num_prefill))
            if num_prefill or self._shown is None or not self._shown.chunks:
                self._shown = step

    def take(self) -> RecentSteps:
        """Return the steps since the last call, and clear the log."""
        recent = RecentSteps(tuple(self._steps), tuple(self._moves), self._num_moves - len(self._moves), self._shown)
        self._steps.clear()
        self._moves.clear()
        self._num_moves, self._shown = 0, None
        return recent
