"""Matrix products: `mma.sync` completes at once, Hopper's `wgmma` completes at its wait.

A product under way holds its accumulators and its operands in registers: no other instruction may name them. It reads
shared memory as late as its wait allows. Products of one chain add to the same accumulators, in their order.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np

from tests.kernels.ptx.number_formats import decode_16, elements, from_tf32
from tests.kernels.ptx.program import Instruction, PtxFault, in_braces
from tests.kernels.ptx.registers import Registers, is_register
from tests.kernels.ptx.shared_memory import BASE, SharedMemory

# --- matrices ---------------------------------------------------------------------------------------------------------
# The places of matrix elements in PTX: in the registers of threads, and in shared memory.

LANES = np.arange(32)
WARPGROUP = 128  # threads that issue a product of Hopper together


@cache
def row_of(groups: int = 1) -> np.ndarray:
    """Return the row of a thread's first element in a fragment of 16 rows per warp, [32 * groups]."""
    thread = np.arange(32 * groups)
    return 16 * (thread // 32) + thread % 32 // 4


@cache
def column_of(groups: int = 1) -> np.ndarray:
    """Return the column of a thread's first element of results, and of operands of 2 bytes, [32 * groups]."""
    return 2 * (np.arange(32 * groups) % 4)


@cache
def left_places(size: int, groups: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return rows and columns [32 * groups] of a left operand in four registers, for each element of each register.

    size: bytes of an element. The operand has 16 rows per warp, and 32 / size columns.
    """
    count = 4 // size  # elements of a register
    first = count * (np.arange(32 * groups) % 4)
    return [
        (row_of(groups) + 8 * (register % 2), first + odd + 4 * count * (register // 2))
        for register in range(4)
        for odd in range(count)
    ]


@cache
def right_places(size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return rows and columns [32] of a right operand in two registers, for each element of each register.

    size: bytes of an element. The operand has 32 / size rows and 8 columns.
    """
    count = 4 // size
    return [
        (count * (LANES % 4) + odd + 4 * count * register, LANES // 4) for register in range(2) for odd in range(count)
    ]


@cache
def accumulator_places(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns [registers, 128] of the accumulators of a product of 64 rows."""
    register = np.arange(columns // 2)
    block, lower, odd = register // 4, register % 4 // 2, register % 2
    rows = row_of(4)[None, :] + 8 * lower[:, None]
    return rows, column_of(4)[None, :] + 8 * block[:, None] + odd[:, None]


@cache
def operand_addresses(descriptor: int, rows: int, transposed: bool, size: int = 2) -> np.ndarray:
    """Return the addresses [rows, 32 / size] of the elements that a matrix descriptor names.

    See PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout". size: bytes of an element. transposed: the
    rows, not the summed elements, are contiguous. Only elements of 2 bytes can be transposed.
    """
    assert size == 2 or not transposed
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = descriptor >> 62
    if mode == 0:
        raise PtxFault("the emulator does not know operands without a swizzle")
    width, bits = {1: (128, 3), 2: (64, 2), 3: (32, 1)}[mode]
    row, depth = np.arange(rows)[:, None], np.arange(32 // size)[None, :]
    if transposed:
        period = width // 2
        at = start + row % period * 2 + row // period * leading + depth % 8 * width + depth // 8 * stride
    else:
        at = start + row // 8 * stride + row % 8 * width + depth * size
    return at ^ ((at >> 7 & (1 << bits) - 1) << 4)


Run = Callable[[], None]

SIZES = {"bf16": 2, "f16": 2, "tf32": 4}  # bytes of an element of an operand
SUMMED = 32  # bytes of the elements that one product sums


def _format(instruction: Instruction) -> str:
    """Return the format of both operands: "bf16", "f16" or "tf32"."""
    formats = [part for part in instruction.parts if part in SIZES]
    assert len(formats) == 2, f"the emulator does not know {instruction.opcode}"
    assert formats[0] == formats[1]
    return formats[0]


def warp_product(registers: Registers, instruction: Instruction) -> Run:
    """Return the effect of mma.sync.aligned.m16n8k16.row.col.f32, or of m16n8k8 for tf32."""
    name = _format(instruction)
    size = SIZES[name]
    depth = SUMMED // size
    assert f"m16n8k{depth}" in instruction.parts, f"the emulator does not know {instruction.opcode}"
    d, a, b, c = (in_braces(operand) for operand in instruction.operands)
    results = [registers.target(one, "f32") for one in d]
    left, right = ([registers.source(one, "b32") for one in some] for some in (a, b))
    old = [registers.source(one, "f32") for one in c]
    warps = registers.threads // 32
    group, lane = LANES // 4, LANES % 4

    def run() -> None:
        x, y = np.empty((warps, 16, depth), np.float32), np.empty((warps, depth, 8), np.float32)
        z = np.empty((warps, 16, 8), np.float32)
        for matrix, operand, places in ((x, left, left_places(size)), (y, right, right_places(size))):
            values = [one for register in operand for one in elements(register, name)]
            for (rows, columns), one in zip(places, values, strict=True):
                matrix[:, rows, columns] = one.reshape(warps, 32)
        for i, values in enumerate(old):
            z[:, group + 8 * (i // 2), 2 * lane + i % 2] = values.reshape(warps, 32)
        total = (np.matmul(x, y, dtype=np.float64) + z).astype(np.float32)
        for i, row in enumerate(results):
            row[:] = total[:, group + 8 * (i // 2), 2 * lane + i % 2].reshape(-1)

    return run


class Products:
    """The products of warpgroups under way. first: number in the block of the first warpgroup."""

    def __init__(self, registers: Registers, shared: SharedMemory, first: int = 0) -> None:
        self._registers, self._shared, self._first = registers, shared, first
        self._open: list[Run] = []
        self._groups: list[list[Run]] = []
        self._accumulators: Counter[tuple[str, ...]] = Counter()  # products under way of each chain
        self._operands: Counter[str] = Counter()
        self._renamed: dict[str, str] = {}  # copies of accumulators under way: target and source
        self.busy: frozenset[str] = frozenset()  # the registers of products under way

    def clear(self) -> None:
        self._open, self._groups = [], []
        self._accumulators.clear()
        self._operands.clear()
        self._renamed = {}
        self.busy = frozenset()

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> None:
        """Complete all committed groups but the last `pending`."""
        while len(self._groups) > pending:
            for finish in self._groups.pop(0):
                finish()

    def check_complete(self) -> None:
        if self._open or self._groups:
            raise PtxFault("the program ends while a product is under way")

    def rename(self, target: str, source: str) -> bool:
        """Let a register receive an accumulator once its products are complete. Return whether that is possible."""
        if target in self.busy or not any(source in chain for chain in self._accumulators):
            return False
        self._renamed[target] = source
        self._note_busy()
        return True

    def _note_busy(self) -> None:
        named = {name for chain in self._accumulators for name in chain}
        for target, source in list(self._renamed.items()):
            if source not in named:
                self._registers.row(target)[:] = self._registers.row(source)
                del self._renamed[target]
        self.busy = frozenset(named | set(self._operands) | set(self._renamed))

    def begin(self, instruction: Instruction) -> Run:
        """Return the effect of wgmma.mma_async."""
        name = _format(instruction)
        size = SIZES[name]
        shape = re.search(rf"m64n(\d+)k{SUMMED // size}\b", instruction.opcode)
        assert shape, f"the emulator does not know {instruction.opcode}"
        columns, registers = int(shape[1]), self._registers
        groups = registers.threads // WARPGROUP
        chain = tuple(in_braces(instruction.operands[0]))
        a, b, scale_d, *flags = instruction.operands[1], instruction.operands[2], *instruction.operands[3:]
        from_registers = a.startswith("{")
        operands = in_braces(a) if from_registers else []
        # An operand of 4 bytes has no flag: it cannot be transposed.
        signs, transposed = flags[:2], [flag == "1" for flag in flags[2:]] or [False] * (1 if from_registers else 2)
        assert signs == ["1", "1"], "the emulator does not know negated operands"
        bank, numbers = registers.rows(list(chain))
        left = [registers.source(one, "b32") for one in operands]
        descriptors = [registers.source(one, "u64") for one in ([b] if from_registers else [a, b])]
        adds = registers.source(scale_d, "pred") if is_register(scale_d) else np.full(registers.threads, scale_d != "0")
        rows_of, columns_of = accumulator_places(columns)

        def addresses(group: int) -> list[np.ndarray]:
            found = []
            for descriptor, rows, flag in zip(
                descriptors, [columns] if from_registers else [64, columns], transposed, strict=True
            ):
                mine = descriptor[WARPGROUP * group : WARPGROUP * (group + 1)]
                if (mine != mine[0]).any():
                    raise PtxFault("the threads of a warpgroup have different descriptors")
                found.append(operand_addresses(int(mine[0]), rows, flag, size) - BASE)
                if (found[-1] < 0).any() or (found[-1] + size > self._shared.size).any():
                    raise PtxFault("a descriptor leaves the shared memory of the block")
            return found

        def run() -> None:
            others = self.busy - set(chain) if chain in self._accumulators else self.busy
            if not others.isdisjoint(chain):
                raise PtxFault("a product under way has these accumulators")
            if any(name in of_chain for of_chain in self._accumulators for name in operands):
                raise PtxFault("the operand in registers is the result of a product under way")
            places = [addresses(group) for group in range(groups)]
            reads = [[np.unique(at // self._shared.unit) for at in mine] for mine in places]
            for group, mine in enumerate(reads):
                for units in mine:
                    self._shared.begin_product(units, self._first + group)
            before = [pair.copy() for pair in left]
            keep = adds.copy()
            self._accumulators[chain] += 1
            self._operands.update(operands)
            self._note_busy()

            def finish() -> None:
                for group in range(groups):
                    threads = slice(WARPGROUP * group, WARPGROUP * (group + 1))
                    if from_registers:
                        x = np.empty((64, SUMMED // size), np.float32)
                        values = [one for register in before for one in elements(register[threads], name)]
                        for at, one in zip(left_places(size, 4), values, strict=True):
                            x[at] = one
                    else:
                        x = self._matrix(places[group][0], name)
                    y = self._matrix(places[group][-1], name)
                    product = (x.astype(np.float64) @ y.T.astype(np.float64))[rows_of, columns_of]
                    old = bank[numbers, threads].view(np.float32)
                    new = (product + np.where(keep[threads], old, np.float32(0))).astype(np.float32)
                    bank[numbers, threads] = new.view(bank.dtype)
                    for units in reads[group]:
                        self._shared.end_product(units, self._first + group)
                self._accumulators[chain] -= 1
                self._operands.subtract(operands)
                self._accumulators, self._operands = +self._accumulators, +self._operands
                self._note_busy()

            self._open.append(finish)

        return run

    def _matrix(self, at: np.ndarray, name: str) -> np.ndarray:
        size = SIZES[name]
        bits = self._shared.data.view(f"u{size}")[at // size]
        return from_tf32(bits) if name == "tf32" else decode_16(bits, name)
