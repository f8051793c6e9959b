"""One block of threads: all threads together, or in groups that take turns.

The threads of most programs stay together and are one group. In a program whose warps have different roles (Triton's
`warp_specialize`) each warpgroup is a group, and warps of a warpgroup that part are groups of their own. A group runs
until it has to wait: at a barrier, for an mbarrier, or for registers. If all groups wait, the program does not end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.ptx.global_memory import GlobalMemory
from tests.kernels.ptx.mbarriers import MBarriers, TensorMap
from tests.kernels.ptx.number_formats import DTYPES
from tests.kernels.ptx.products import WARPGROUP
from tests.kernels.ptx.program import Program, PtxFault, in_braces
from tests.kernels.ptx.shared_memory import SharedMemory
from tests.kernels.ptx.thread_group import END, WARP, ThreadGroup, WarpsPart


@dataclass
class _Barrier:
    threads: int = 0
    arrived: list[ThreadGroup] = field(default_factory=list)
    released: list[ThreadGroup] = field(default_factory=list)  # they have not asked again since


class ThreadBlock:
    """A block, reused for all blocks of a launch.

    parameters: the bits of each parameter of the program. shared_bytes: of the launch. renames: see `ThreadGroup`.
    maps: the descriptors of tensors, by their address.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, int],
        shared_bytes: int,
        memory: GlobalMemory,
        renames: bool = False,
        maps: Mapping[int, TensorMap] | None = None,
    ) -> None:
        self._program, self._parameters, self._memory, self._renames = program, parameters, memory, renames
        self.shared = SharedMemory(shared_bytes, _smallest_access(program), -(-program.threads // WARP))
        self.mbarriers = MBarriers(self.shared, memory, maps or {})
        has_roles = any(one.parts[0] == "brx" for one in program.instructions)
        size = WARPGROUP if has_roles else program.threads
        self._groups = [self._group(range(at, at + size)) for at in range(0, program.threads, size)]

    def _group(self, members: range) -> ThreadGroup:
        return ThreadGroup(self._program, self._parameters, self, members, self._memory, self._renames)

    def run(self, place: tuple[int, int, int], grid: tuple[int, int, int]) -> int:
        """Execute the program for one block of the grid; return the number of instructions."""
        self.shared.clear()
        self.mbarriers.clear()
        self._barriers: dict[int, _Barrier] = {}
        self._registers = dict.fromkeys(range(self._program.threads // WARP), self._program.max_registers)
        self._memory.begin_block()
        for group in self._groups:
            group.begin(place, grid)
        try:
            while any(group.at != END for group in self._groups):
                advanced = [self._advance(group) for group in self._groups if group.at != END]
                if not any(advanced):
                    waiting = [group for group in self._groups if group.at != END]
                    where = "; ".join(self._program.instructions[group.at].text for group in waiting)
                    raise PtxFault(f"all threads wait: {where}")
            self.mbarriers.check_complete()
            self._memory.end_block()
        except WarpsPart:  # at the first branch to roles, before any of them has begun
            return self.run(place, grid)
        except PtxFault as fault:
            raise PtxFault(f"{self._program.name}, block {place}: {fault}") from None
        return sum(group.steps for group in self._groups)

    def _advance(self, group: ThreadGroup) -> bool:
        try:
            return group.advance()
        except WarpsPart:
            at = self._groups.index(group)
            self._groups[at : at + 1] = [self._group(group.members[i : i + WARP]) for i in range(0, WARPGROUP, WARP)]
            raise

    def meet(self, group: ThreadGroup, number: int, threads: int) -> bool:
        one = self._barriers.setdefault(number, _Barrier())
        if group in one.released:
            one.released.remove(group)
            return True
        if group in one.arrived:
            return False
        if one.arrived and one.threads != threads:
            raise PtxFault("the threads of a barrier count differently")
        one.threads = threads
        one.arrived.append(group)
        present = sum(len(other.members) for other in one.arrived)
        if present > threads:
            raise PtxFault("more threads arrive at a barrier than it counts")
        if present < threads:
            return False
        self.shared.barrier(np.concatenate([other.warps for other in one.arrived]))
        one.released += [other for other in one.arrived if other is not group]
        one.arrived = []
        return True

    def resize(self, group: ThreadGroup, registers: int, grows: bool) -> bool:
        if registers % 8 or not 24 <= registers <= 256:
            raise PtxFault("a thread cannot have this number of registers")
        now = {self._registers[warp] for warp in group.warps}
        if any((registers > count) != grows for count in now if count != registers):
            raise PtxFault("registers are added by setmaxnreg.inc, and given back by setmaxnreg.dec")
        of_block = self._program.max_registers * len(self._registers)
        others = sum(count for warp, count in self._registers.items() if warp not in group.warps)
        if others + registers * len(group.warps) > of_block:
            return False
        self._registers |= dict.fromkeys(group.warps, registers)
        return True


def _smallest_access(program: Program) -> int:
    """Return the fewest bytes of shared memory that a store of the program writes at a time, at most 4."""
    sizes = [
        DTYPES[one.parts[-1]].itemsize * len(in_braces(one.operands[1]))
        for one in program.instructions
        if one.parts[0] == "st" and "shared" in one.parts
    ]
    return min([4, *sizes])
