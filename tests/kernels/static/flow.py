"""The control flow of a compiled kernel, for PTX and for machine code alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)
# A walk has few states per block. More would mean that its states do not return to old ones.
MAX_STATES = 500


class Jump(NamedTuple):
    """The instructions that may run next: those at the indices `target` and `others`, and the following one if
    `falls_through`."""

    target: int | None
    falls_through: bool
    others: tuple[int, ...] = ()


NEXT = Jump(None, True)


@dataclass(frozen=True)
class Flow:
    """The basic blocks of a kernel. The first block is the entry."""

    blocks: list[range]  # indices of instructions
    successors: list[list[int]]  # blocks; an empty list is the end of the kernel

    @classmethod
    def of(cls, jumps: Sequence[Jump], labels: Sequence[int]) -> Flow:
        """jumps: of each instruction. labels: the indices of the instructions that have a label."""
        ends = {i + 1 for i, jump in enumerate(jumps) if jump != NEXT}
        starts = sorted(({0} | ends | set(labels)) - {len(jumps)})
        blocks = [range(start, end) for start, end in zip(starts, [*starts[1:], len(jumps)], strict=True)]
        place: dict[int | None, int] = {block.start: number for number, block in enumerate(blocks)}
        successors = []
        for number, block in enumerate(blocks):
            jump = jumps[block[-1]]
            found = [place[target] for target in (jump.target, *jump.others) if target in place]
            if jump.falls_through and number + 1 < len(blocks):
                found.append(number + 1)
            successors.append(list(dict.fromkeys(found)))
        return cls(blocks, successors)

    @cached_property
    def postdominators(self) -> list[set[int]]:
        """For each block, the blocks that every way from it to the end passes, with itself."""
        everything = set(range(len(self.blocks)))
        found = [{i} if not self.successors[i] else set(everything) for i in everything]
        changed = True
        while changed:
            changed = False
            for i in reversed(range(len(self.blocks))):
                if not self.successors[i]:
                    continue
                new = {i} | set.intersection(*(found[j] for j in self.successors[i]))
                if new != found[i]:
                    found[i], changed = new, True
        return found

    @cached_property
    def decides(self) -> list[set[int]]:
        """For each block, the blocks whose execution its branch decides: also how often, if it closes a loop."""
        found: list[set[int]] = []
        for i, after in enumerate(self.successors):
            mine = set().union(*(self.postdominators[j] for j in after)) if len(after) > 1 else set()
            found.append(mine - (self.postdominators[i] - {i}))
        # A block decides what the blocks that it decides decide.
        changed = True
        while changed:
            changed = False
            for mine in found:
                more = set().union(*(found[j] for j in mine)) - mine if mine else set()
                if more:
                    mine |= more
                    changed = True
        return found

    @cached_property
    def loops(self) -> list[range]:
        """The instructions of each innermost loop: from the target of a backward jump to the jump."""
        found = {
            (self.blocks[j].start, self.blocks[i].stop)
            for i, after in enumerate(self.successors)
            for j in after
            if self.blocks[j].start <= self.blocks[i].start
        }
        inner = [
            one
            for one in found
            if not any(other != one and one[0] <= other[0] and other[1] <= one[1] for other in found)
        ]
        return [range(*one) for one in sorted(inner)]

    def walk(self, state: State, step: Callable[[State, int], State]) -> None:
        """Follow all ways through the kernel. step(state, index of an instruction) returns the state after it."""
        seen: list[set[State]] = [set() for _ in self.blocks]
        todo = [(0, state)]
        while todo:
            block, state = todo.pop()
            if state in seen[block]:
                continue
            seen[block].add(state)
            assert len(seen[block]) < MAX_STATES, "the states of a walk do not repeat"
            for index in self.blocks[block]:
                state = step(state, index)
            todo += [(after, state) for after in self.successors[block]]
