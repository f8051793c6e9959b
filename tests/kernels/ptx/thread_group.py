"""Threads that execute a program together, one instruction after the other: all of a block, or a part of its warps.

If the threads of a group take different branches, the threads at the lowest instruction continue alone until they meet
the rest; barriers, exchanges within a warp and matrix instructions are faults there. Each instruction is bound to its
registers once, and then executed for every block of a launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from tests.kernels.ptx import arithmetic, products
from tests.kernels.ptx.global_memory import GlobalMemory
from tests.kernels.ptx.mbarriers import MBarriers
from tests.kernels.ptx.number_formats import DTYPES
from tests.kernels.ptx.program import Instruction, Program, PtxFault, in_braces
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.shared_memory import BASE, SharedMemory

# --- copies -----------------------------------------------------------------------------------------------------------
# Asynchronous copies from global to shared memory: each is delivered by the last wait that allows it to be late.


class Copies:
    """The copies under way, in groups."""

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] = []
        self._groups: list[list[Callable[[], None]]] = []

    def clear(self) -> None:
        self._open, self._groups = [], []

    def begin(self, deliver: Callable[[], None]) -> None:
        self._open.append(deliver)

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> None:
        """Deliver all committed groups but the last `pending`."""
        while len(self._groups) > pending:
            for deliver in self._groups.pop(0):
                deliver()

    def check_complete(self) -> None:
        if self._open or any(self._groups):
            raise PtxFault("the program ends while a copy is in flight")


WARP = 32
END, WAIT = -1, -2  # in place of the next instruction; WAIT: the instruction is tried again later
COLLECTIVE = {
    "griddepcontrol",
    "bar",
    "barrier",
    "fence",
    "shfl",
    "redux",
    "ldmatrix",
    "stmatrix",
    "mma",
    "wgmma",
    "cp",
    "ret",
    "brx",
    "elect",
    "mbarrier",
    "setmaxnreg",
}
MAX_STEPS = 20_000_000  # of one block: more are an endless loop

Run = Callable[[], int | None]


class WarpsPart(Exception):
    """The warps of a group take different branches of a table."""


class Block(Protocol):
    """The block of a group, with the state that its groups share."""

    shared: SharedMemory
    mbarriers: MBarriers

    def meet(self, group: ThreadGroup, number: int, threads: int) -> bool:
        """Arrive at a barrier, or ask again. Return whether all of its threads have arrived."""

    def resize(self, group: ThreadGroup, registers: int, grows: bool) -> bool:
        """Change the registers of each thread of a group. Return whether the block has them."""


class ThreadGroup:
    """Threads of a block, reused for all blocks of a launch.

    parameters: the bits of each parameter of the program. members: numbers of the threads, of whole warps. renames: a
    `mov` of an accumulator of a product under way is a second name of it. Otherwise it is a fault.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, int],
        block: Block,
        members: range,
        memory: GlobalMemory,
        renames: bool = False,
    ) -> None:
        self._program, self._parameters, self._memory = program, parameters, memory
        self._renames, threads = renames, len(members)
        self._block, self.members = block, members
        self._registers = Registers(program, threads)
        self._thread = np.arange(threads)
        self._lane, self._warps = self._thread % WARP, (self._thread + members.start) // WARP
        self.warps = np.unique(self._warps)
        self._first_of_warp = self._thread - self._lane
        self._shared = block.shared
        self._copies = Copies()
        self._products = products.Products(self._registers, self._shared, members.start // products.WARPGROUP)
        self._active = np.ones(threads, bool)  # the threads that are at the present instruction
        self._elsewhere: dict[int, np.ndarray] = {}  # the other threads, by their next instruction
        self._place = {axis: np.zeros(threads, np.uint32) for axis in "xyz"}
        self._grid = {axis: np.ones(threads, np.uint32) for axis in "xyz"}
        special = self._registers.special
        for axis in "xyz":
            special[f"%ctaid.{axis}"], special[f"%nctaid.{axis}"] = self._place[axis], self._grid[axis]
            special[f"%tid.{axis}"] = np.array(members if axis == "x" else [0] * threads, np.uint32)
            special[f"%ntid.{axis}"] = np.full(threads, program.threads if axis == "x" else 1, np.uint32)
        special["%laneid"] = self._lane.astype(np.uint32)
        self._is_divided = False  # whether `_bind` binds instructions for some of the threads
        self._runs = [self._bind(one) for one in program.instructions]
        self._divided_runs: dict[int, Run] = {}  # bound when the threads first execute them separately
        self._names = [one.registers for one in program.instructions]
        self._writers = {
            number: _writers(program, one)
            for number, one in enumerate(program.instructions)
            if one.opcode.startswith("wgmma.mma_async")
        }
        self._fences = {
            number for number, one in enumerate(program.instructions) if one.opcode.startswith("wgmma.fence")
        }

    def begin(self, place: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        """Go to the first instruction, in one block of the grid."""
        for axis, at, of in zip("xyz", place, grid, strict=True):
            self._place[axis][:], self._grid[axis][:] = at, of
        self._registers.clear()
        self._copies.clear()
        self._products.clear()
        self._active[:] = True
        self._elsewhere = {}
        self._since_fence: set[int] = set()  # the instructions that have run since the last fence of products
        self._has_fenced = False
        self.at, self.steps = 0, 0

    def advance(self) -> bool:
        """Execute the program to its end, or until an instruction waits. Return whether an instruction was executed."""
        before, at, runs, under_way = self.steps, self.at, self._runs, self._products
        try:
            while at != END:
                if under_way.busy and not self._may_touch(at):
                    if self._renamed(at):
                        at += 1
                        continue
                    raise PtxFault("touches a register of a product under way")
                if self._writers:
                    self._check_fences(at)
                target = self._divided_run(at)() if self._elsewhere else runs[at]()
                if target == WAIT:
                    break
                self.steps += 1
                at = at + 1 if target is None else target
                if self._elsewhere:
                    at = self._meet(at)
                if self.steps > MAX_STEPS:
                    raise PtxFault("the program does not end")
            if at == END:
                self._copies.check_complete()
                self._products.check_complete()
        except PtxFault as fault:
            where = self._program.instructions[at].text if at != END else "at the end"
            raise PtxFault(f"{fault}: {where}") from None
        self.at = at
        return self.steps > before

    def _check_fences(self, at: int) -> None:
        if at in self._writers and not self._has_fenced:
            raise PtxFault("no wgmma.fence lies before the first product")
        if at in self._writers and (unordered := self._since_fence & self._writers[at]):
            writer = self._program.instructions[min(unordered)].text
            raise PtxFault(f"no wgmma.fence lies between {writer} and a product with its result")
        self._since_fence.add(at)
        if at in self._fences:
            self._since_fence.clear()
            self._has_fenced = True

    def _may_touch(self, at: int) -> bool:
        instruction = self._program.instructions[at]
        return instruction.parts[0] == "wgmma" or self._products.busy.isdisjoint(self._names[at])

    def _renamed(self, at: int) -> bool:
        one = self._program.instructions[at]
        plain = self._renames and one.parts[0] == "mov" and one.guard is None and len(one.registers) == 2
        return plain and self._products.rename(*one.operands)

    # Threads at different instructions

    def _meet(self, at: int) -> int:
        """Return the lowest instruction of a thread, and make the threads there the active ones."""
        lowest = min(at, *self._elsewhere)
        if lowest < at:
            self._elsewhere[at] = self._elsewhere.get(at, False) | self._active
            self._active[:] = False
        self._active |= self._elsewhere.pop(lowest, False)
        return lowest

    def _divided_run(self, at: int) -> Run:
        if at not in self._divided_runs:
            self._is_divided = True
            self._divided_runs[at] = self._bind(self._program.instructions[at])
            self._is_divided = False
        return self._divided_runs[at]

    # Binding

    def _mask(self, instruction: Instruction) -> Callable[[], np.ndarray]:
        """Return a function that gives the threads that execute the instruction."""
        active = self._active
        if instruction.guard is None:
            return lambda: active
        row = self._registers.row(instruction.guard)
        if self._is_divided:
            return (lambda: ~row & active) if instruction.negated else (lambda: row & active)
        return (lambda: ~row) if instruction.negated else (lambda: row)

    def _writer(self, name: str, kind: str, instruction: Instruction) -> Callable[[np.ndarray], None]:
        """Return a function that writes values of a type to a register, in the threads that execute the instruction."""
        if name == "_":
            return lambda values: None
        target = self._registers.target(name, kind)
        if instruction.guard is None and not self._is_divided:

            def write_all(values: np.ndarray) -> None:
                target[:] = values

            return write_all
        mask = self._mask(instruction)
        return lambda values: np.copyto(target, values, where=mask(), casting="unsafe")

    def _addresses(self, operand: str) -> Callable[[], np.ndarray]:
        """Return a function that gives the addresses of `[register + offset]`, [threads] int64."""
        match = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        assert match, f"no address: {operand}"
        offset = int(match[2] or "0", 0)
        if match[1] == "global_smem":
            fixed = np.full(len(self._thread), BASE + offset, np.int64)
            return lambda: fixed
        row = self._registers.row(match[1])
        return lambda: row.astype(np.int64) + offset

    def _bind(self, instruction: Instruction) -> Run:
        """Return the effect of an instruction. It returns the index of the next one, or None for the following one."""
        binders = {
            "bra": self._branch, "ret": self._return, "mov": self._move, "ld": self._load, "st": self._store,
            "cp": self._copy, "bar": self._barrier, "barrier": self._barrier, "fence": self._fence,
            "atom": self._atomic, "griddepcontrol": self._grid_dependency, "brx": self._branch_by_table,
            "mbarrier": self._mbarrier, "elect": self._elect, "setmaxnreg": self._resize,
            "shfl": self._shuffle, "redux": self._reduce, "ldmatrix": self._load_matrix,
            "stmatrix": self._store_matrix, "mma": self._warp_product, "wgmma": self._product,
        }  # fmt: skip
        if self._is_divided and instruction.parts[0] in COLLECTIVE:
            return _refuse
        binder = binders.get(instruction.parts[0], self._compute)
        return binder(instruction)

    def _compute(self, instruction: Instruction) -> Run:
        function = arithmetic.function_of(instruction)
        assert function is not None, f"the emulator does not know {instruction.opcode}"
        target, *operands = instruction.operands
        sources = [self._registers.source(one, kind) for one, kind in zip(operands, function.sources, strict=True)]
        write, compute = self._writer(target, function.target, instruction), function.compute

        def run() -> None:
            write(compute(*sources))

        return run

    def _move(self, instruction: Instruction) -> Run:
        target, source = instruction.operands
        kind = instruction.parts[-1]
        if source == "global_smem":
            write = self._writer(target, kind, instruction)
            base = np.full(len(self._thread), BASE, DTYPES[kind])
            return lambda: write(base)
        if source in self._parameters:  # the address of a descriptor
            write = self._writer(target, kind, instruction)
            address = np.full(len(self._thread), self._parameters[source], DTYPES[kind])
            return lambda: write(address)
        if source.startswith("{"):
            parts = in_braces(source)
            part_kind = f"b{8 * DTYPES[kind].itemsize // len(parts)}"
            sources = [self._registers.source(one, part_kind) for one in parts]
            write = self._writer(target, kind, instruction)
            return lambda: write(np.stack(sources, axis=1).view(DTYPES[kind]).reshape(-1))
        if target.startswith("{"):
            parts = in_braces(target)
            part_kind = f"b{8 * DTYPES[kind].itemsize // len(parts)}"
            whole = self._registers.source(source, kind)
            writers = [self._writer(one, part_kind, instruction) for one in parts]

            def run() -> None:
                pieces = np.ascontiguousarray(whole).view(DTYPES[part_kind]).reshape(len(whole), -1)
                for number, write_part in enumerate(writers):
                    write_part(pieces[:, number])

            return run
        return self._compute(instruction)

    def _branch(self, instruction: Instruction) -> Run:
        target = self._program.labels[instruction.operands[0]]
        if instruction.guard is None:
            return lambda: target
        mask = self._mask(instruction)

        def run() -> int | None:
            taken = mask()
            left = self._active & ~taken
            if not taken.any():
                return None
            if left.any():
                self._elsewhere[target] = self._elsewhere.get(target, False) | taken
                self._active[:] = left
                return None
            return target

        return run

    def _branch_by_table(self, instruction: Instruction) -> Run:
        index = self._registers.source(instruction.operands[0], "u32")
        table = [self._program.labels[name] for name in self._program.tables[instruction.operands[1]]]

        def run() -> int:
            if (index != index[0]).any():
                raise WarpsPart
            return table[index[0]]

        return run

    def _return(self, instruction: Instruction) -> Run:
        assert instruction.guard is None, "the emulator does not know guarded returns"
        return lambda: END

    # Memory

    def _load(self, instruction: Instruction) -> Run:
        parts, kind = instruction.parts, instruction.parts[-1]
        names = in_braces(instruction.operands[0])
        if parts[1] == "param":
            (name,) = names
            bits = self._parameters[instruction.operands[1].strip("[] ")]
            write, size = self._writer(name, kind, instruction), DTYPES[kind].itemsize
            value = np.full(len(self._thread), bits & (2 ** (8 * size) - 1), f"u{size}").view(DTYPES[kind])
            return lambda: write(value)
        writers = [self._writer(one, kind, instruction) for one in names]
        addresses, mask, dtype = self._addresses(instruction.operands[1]), self._mask(instruction), DTYPES[kind]
        size, shared = dtype.itemsize * len(names), parts[1] == "shared"
        threads = len(self._thread)

        def run() -> None:
            at, active = addresses(), mask()
            if shared:
                found = self._shared.read(at[active], size, self._warps[active])
            else:
                found = self._memory.read(at[active], size)
            data = np.zeros((threads, size), np.uint8)
            data[active] = found
            values = data.view(dtype)
            for number, write_one in enumerate(writers):
                write_one(values[:, number])

        return run

    def _store(self, instruction: Instruction) -> Run:
        parts, kind = instruction.parts, instruction.parts[-1]
        sources = [self._registers.source(one, kind) for one in in_braces(instruction.operands[1])]
        addresses, mask = self._addresses(instruction.operands[0]), self._mask(instruction)
        shared = parts[1] == "shared"

        def run() -> None:
            at, active = addresses(), mask()
            data = np.stack([one[active] for one in sources], axis=1).view(np.uint8)
            if shared:
                self._shared.write(at[active], data, self._warps[active])
            else:
                self._memory.write(at[active], data)

        return run

    def _atomic(self, instruction: Instruction) -> Run:
        """Bind an atomic addition to global memory. The threads of a block add one after the other."""
        parts, kind = instruction.parts, instruction.parts[-1]
        known = parts[1] == "global" and "relaxed" in parts and "add" in parts and kind in ("u32", "s32", "u64")
        assert known, f"the emulator does not know {instruction.opcode}"
        source = self._registers.source(instruction.operands[2], kind)
        write = self._writer(instruction.operands[0], kind, instruction)
        addresses, mask, dtype = self._addresses(instruction.operands[1]), self._mask(instruction), DTYPES[kind]
        threads = len(self._thread)

        def run() -> None:
            at, active = addresses(), mask()
            places, number = np.unique(at[active], return_inverse=True)
            added = source[active]
            before = self._memory.read(places, dtype.itemsize).view(dtype)[:, 0]
            order = np.argsort(number, kind="stable")
            sums = np.cumsum(added[order], dtype=dtype)
            is_first = np.diff(number[order], prepend=-1) != 0
            start = (sums - added[order])[is_first]  # what the threads of other places have added
            found = np.zeros(threads, dtype)
            found[np.flatnonzero(active)[order]] = (before - start)[number[order]] + sums - added[order]
            total = before.copy()
            np.add.at(total, number, added)
            self._memory.write(places, total.view(np.uint8).reshape(len(places), dtype.itemsize))
            write(found)

        return run

    def _copy(self, instruction: Instruction) -> Run:
        kind = instruction.parts[2]
        if kind == "bulk":
            return self._copy_tile(instruction)
        if kind == "commit_group":
            return self._copies.commit
        if kind in ("wait_group", "wait_all"):
            pending = int(instruction.operands[0]) if kind == "wait_group" else 0
            return lambda: self._copies.wait(pending)
        assert kind in ("ca", "cg"), f"the emulator does not know {instruction.opcode}"
        size = int(instruction.operands[2], 0)
        to, source = (self._addresses(one) for one in instruction.operands[:2])
        count = self._registers.source(instruction.operands[3] if len(instruction.operands) > 3 else str(size), "u32")
        mask = self._mask(instruction)

        def run() -> None:
            active = mask().copy()
            at, from_, read = to()[active], source()[active], count[active]
            warps = self._warps[active]
            self._memory.check_read(from_[read > 0], size)
            self._shared.begin_copy(at, size, warps)

            def deliver() -> None:
                data = np.zeros((len(at), size), np.uint8)
                some = read > 0
                data[some] = self._memory.read(from_[some], size)
                data[np.arange(size)[None, :] >= read[:, None]] = 0
                self._shared.end_copy(at, data, warps)

            self._copies.begin(deliver)

        return run

    def _copy_tile(self, instruction: Instruction) -> Run:
        """Bind a copy by a descriptor (TMA). It is delivered by the wait for its mbarrier."""
        known = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
        assert instruction.opcode == known, f"the emulator does not know {instruction.opcode}"
        to, tensor, mbarrier = instruction.operands
        tile = re.fullmatch(r"\[\s*(%\w+),\s*\{\s*([%\w]+),\s*([%\w]+)\s*\}\s*\]", tensor)
        assert tile, f"no place in a tensor: {tensor}"
        descriptor = self._registers.source(tile[1], "u64")
        column, row = (self._registers.source(one, "s32") for one in tile.groups()[1:])
        places, mbarriers, mask = self._addresses(to), self._addresses(mbarrier), self._mask(instruction)

        def run() -> None:
            for one in np.flatnonzero(mask()):
                self._block.mbarriers.copy(
                    self._warps[one], int(descriptor[one]), int(row[one]), int(column[one]), int(places()[one]),
                    int(mbarriers()[one]),
                )  # fmt: skip

        return run

    def _mbarrier(self, instruction: Instruction) -> Run:
        kind, mbarriers = instruction.parts[1], self._block.mbarriers
        assert "shared::cta" in instruction.parts, f"the emulator does not know {instruction.opcode}"
        if kind == "init":
            count, mask = int(instruction.operands[1]), self._mask(instruction)
            addresses = self._addresses(instruction.operands[0])

            def init() -> None:
                for one in np.flatnonzero(mask()):
                    mbarriers.init(self._warps[one], int(addresses()[one]), count)

            return init
        addresses = self._addresses(instruction.operands[1])
        if kind == "arrive":
            assert instruction.operands[0] == "_", "the emulator does not know states of mbarriers"
            number = int(instruction.operands[2], 0) if len(instruction.operands) > 2 else None
            mask, expects = self._mask(instruction), "expect_tx" in instruction.parts

            def arrive() -> None:
                for one in np.flatnonzero(mask()):
                    at = int(addresses()[one])
                    if expects:
                        mbarriers.expect(self._warps[one], at, number)
                    mbarriers.arrive(self._warps[one], at, 1 if expects or number is None else number)

            return arrive
        assert (kind, instruction.guard) == ("try_wait", None), f"the emulator does not know {instruction.opcode}"
        write = self._writer(instruction.operands[0], "pred", instruction)
        parity, done = self._registers.source(instruction.operands[2], "u32"), np.ones(len(self._thread), bool)

        def wait() -> int | None:
            at = addresses()
            if (at != at[0]).any() or (parity != parity[0]).any():
                raise PtxFault("the threads of a group wait for different phases")
            if not mbarriers.wait(self.warps, int(at[0]), int(parity[0])):
                return WAIT
            write(done)
            return None

        return wait

    def _elect(self, instruction: Instruction) -> Run:
        """Bind the choice of a lane. PTX does not say which: it is not the first, on which a program might rely."""
        register, predicate = instruction.operands[0].split("|")
        lane, chosen = np.full(len(self._thread), WARP - 1, np.uint32), self._lane == WARP - 1
        writers = self._writer(register, "b32", instruction), self._writer(predicate, "pred", instruction)

        def run() -> None:
            for write, values in zip(writers, (lane, chosen), strict=True):
                write(values)

        return run

    def _resize(self, instruction: Instruction) -> Run:
        registers, grows = int(instruction.operands[0]), instruction.parts[1] == "inc"
        return lambda: None if self._block.resize(self, registers, grows) else WAIT

    def _barrier(self, instruction: Instruction) -> Run:
        if "warp" in instruction.parts:
            return lambda: None  # the lanes of a warp are in step
        assert instruction.guard is None, "the emulator does not know guarded barriers"
        number, *threads = (int(one) for one in instruction.operands)
        count = threads[0] if threads else self._program.threads
        return lambda: None if self._block.meet(self, number, count) else WAIT

    def _grid_dependency(self, instruction: Instruction) -> Run:
        """Bind `griddepcontrol`. The next kernel may start at any time, which `GlobalMemory` takes it to do."""
        return self._memory.wait if instruction.parts[1] == "wait" else lambda: None

    def _fence(self, instruction: Instruction) -> Run:
        return (lambda: self._shared.fence(self.warps)) if "proxy" in instruction.parts else lambda: None

    # Exchange between the lanes of a warp

    def _shuffle(self, instruction: Instruction) -> Run:
        mode = instruction.parts[2]
        target = instruction.operands[0]
        assert "|" not in target, "the emulator does not know shuffles with a predicate"
        source = self._registers.source(instruction.operands[1], "b32")
        distance = self._registers.source(instruction.operands[2], "s32")
        write, lane, first = self._writer(target, "b32", instruction), self._lane, self._first_of_warp

        def run() -> None:
            if mode == "bfly":
                other = lane ^ distance
            elif mode == "idx":
                other = distance % WARP
            elif mode == "up":
                other = np.where(lane - distance < 0, lane, lane - distance)
            else:
                other = np.where(lane + distance >= WARP, lane, lane + distance)
            write(source[first + other])

        return run

    def _reduce(self, instruction: Instruction) -> Run:
        kind = instruction.parts[-1]
        function = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and}[
            instruction.parts[2]
        ]
        source = self._registers.source(instruction.operands[1], kind)
        write = self._writer(instruction.operands[0], kind, instruction)

        def run() -> None:
            by_warp = function.reduce(source.reshape(-1, WARP), axis=1, dtype=source.dtype)
            write(np.repeat(by_warp, WARP))

        return run

    # Matrices

    def _load_matrix(self, instruction: Instruction) -> Run:
        names, transposed = in_braces(instruction.operands[0]), "trans" in instruction.parts
        writers = [self._writer(one, "b32", instruction) for one in names]
        addresses = self._addresses(instruction.operands[1])
        lane, first, thread = self._lane, self._first_of_warp, self._thread
        active = lane < 8 * len(names)

        def run() -> None:
            rows = np.zeros((len(thread), 8), np.uint16)
            rows[active] = self._shared.read(addresses()[active], 16, self._warps[active]).view(np.uint16)
            for number, write in enumerate(writers):
                if transposed:
                    place = first + 8 * number + 2 * (lane % 4)
                    low, high = rows[place, lane // 4], rows[place + 1, lane // 4]
                else:
                    place, column = first + 8 * number + lane // 4, 2 * (lane % 4)
                    low, high = rows[place, column], rows[place, column + 1]
                write(low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16)))

        return run

    def _store_matrix(self, instruction: Instruction) -> Run:
        names, transposed = in_braces(instruction.operands[1]), "trans" in instruction.parts
        sources = [self._registers.source(one, "b32") for one in names]
        addresses = self._addresses(instruction.operands[0])
        lane, first, thread = self._lane, self._first_of_warp, self._thread
        active = lane < 8 * len(names)

        def run() -> None:
            rows = np.zeros((len(thread), 8), np.uint16)
            for number, source in enumerate(sources):
                low, high = (source & np.uint32(0xFFFF)).astype(np.uint16), (source >> np.uint32(16)).astype(np.uint16)
                if transposed:
                    place = first + 8 * number + 2 * (lane % 4)
                    rows[place, lane // 4], rows[place + 1, lane // 4] = low, high
                else:
                    place, column = first + 8 * number + lane // 4, 2 * (lane % 4)
                    rows[place, column], rows[place, column + 1] = low, high
            self._shared.write(addresses()[active], rows.view(np.uint8)[active], self._warps[active])

        return run

    def _warp_product(self, instruction: Instruction) -> Run:
        return products.warp_product(self._registers, instruction)

    def _product(self, instruction: Instruction) -> Run:
        kind = instruction.parts[1]
        if kind == "commit_group":
            return self._products.commit
        if kind == "wait_group":
            pending = int(instruction.operands[0])
            return lambda: self._products.wait(pending)
        return (lambda: None) if kind == "fence" else self._products.begin(instruction)


def _refuse() -> None:
    raise PtxFault("some threads of the block are at another instruction")


def _writers(program: Program, product: Instruction) -> frozenset[int]:
    """Return the instructions that write an accumulator of a product, or its operand in registers.

    Copies from register to register do not count. LLVM places such copies between the fence and the product, and ptxas
    adds a fence after them.
    """
    vectors = [in_braces(operand) for operand in product.operands[:2] if operand.startswith("{")]
    named = {name for vector in vectors for name in vector}
    return frozenset(
        number
        for number, one in enumerate(program.instructions)
        if one.parts[0] != "mov" and not named.isdisjoint(one.written)
    )
