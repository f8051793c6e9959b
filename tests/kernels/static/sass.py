"""The machine code of a kernel, as nvdisasm prints it, parsed: instructions, control flow and registers."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton

from tests.kernels.static.flow import NEXT, Flow, Jump

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?\w+)\s+)?([\w.]+)\s*(.*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")
BRANCHES, ENDS = ("BRA", "JMP", "BRX"), ("EXIT", "RET")
# Instructions whose first operand, if it is a register, is no result.
STORES = ("STG", "STS", "STL", "ST", "STSM", "STTM", "LDGSTS", "RED", "REDG", "REDS", "UTMALDG", "R2UR", "R2P", "R2B")
PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")  # of warpgroups
MAX_GROUPS = 8  # of products that are told apart
Busy = frozenset[tuple[bool, int]]  # registers, and whether only writing to them is forbidden
WIDE = ("DADD", "DMUL", "DFMA", "IMAD.WIDE", "UIMAD.WIDE")


@dataclass(frozen=True)
class SassInstruction:
    """One instruction."""

    address: int
    guard: str | None
    opcode: str  # with its suffixes: "LDG.E.128"
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.partition(".")[0]

    @property
    def text(self) -> str:
        return f"/*{self.address:04x}*/ {self.opcode} {', '.join(self.operands)}"

    @cached_property
    def is_product(self) -> bool:
        return self.name in PRODUCTS

    @cached_property
    def accumulators(self) -> frozenset[int]:
        """The registers with the results of a product of warpgroups."""
        shape = re.search(r"\.64x(\d+)x", self.opcode)
        assert shape, self.text
        halves = 2 if ".F16." in self.opcode else 1  # results in float16 share registers
        return _span(self.operands[0], int(shape[1]) // 2 // halves)

    @cached_property
    def operand_registers(self) -> frozenset[int]:
        """The registers with the first operand of a product of warpgroups; none if it is in shared memory."""
        return _span(self.operands[1], 4)

    @cached_property
    def written(self) -> frozenset[int]:
        """The registers that an instruction other than a product of warpgroups writes."""
        if not self.operands or self.name in STORES:
            return frozenset()
        return _span(self.operands[0], self._width)

    @cached_property
    def read(self) -> frozenset[int]:
        """The registers that an instruction other than a product of warpgroups reads, at least these."""
        sources = self.operands if self.name in STORES else self.operands[1:]
        found: set[int] = set()
        for operand in sources:
            for number, wide in REGISTER.findall(operand):
                found |= set(range(int(number), int(number) + (2 if wide else 1)))
        if self.name in STORES:
            found |= _span(self.operands[-1], self._width)
        if self.name in ("HMMA", "IMMA", "QMMA"):
            for operand, count in zip(self.operands[1:4], (4, 2, 4), strict=True):
                found |= _span(operand, count)
        return frozenset(found)

    @property
    def _width(self) -> int:
        """The number of registers of a result, or of a stored value."""
        if self.name in ("LDSM", "STSM"):
            return 4 if self.opcode.endswith(".4") else 2 if self.opcode.endswith(".2") else 1
        if self.name in ("HMMA", "IMMA", "QMMA") or ".128" in self.opcode:
            return 4
        return 2 if ".64" in self.opcode or self.opcode.startswith(WIDE) else 1


def _span(operand: str, count: int) -> frozenset[int]:
    first = re.match(r"[-|~]*R(\d+)", operand)
    return frozenset(range(int(first[1]), int(first[1]) + count)) if first else frozenset()


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel."""

    instructions: list[SassInstruction]
    labels: dict[str, int]

    @cached_property
    def flow(self) -> Flow:
        jumps = []
        for one in self.instructions:
            if one.name in BRANCHES:
                targets = re.findall(r"\.L_x_\d+", " ".join(one.operands))
                assert targets, f"the target of {one.text} is unknown"
                is_conditional = one.guard is not None or (len(one.operands) > 1 and one.name != "BRX")
                first, *others = (self.labels[target] for target in targets)
                jumps.append(Jump(first, is_conditional, tuple(others)))
            elif one.name in ENDS:
                jumps.append(Jump(None, one.guard is not None))
            else:
                jumps.append(NEXT)
        return Flow.of(jumps, [at for at in self.labels.values() if at < len(self.instructions)])

    def loops(self, least: int = 24) -> list[Counter[str]]:
        """Return how often each innermost loop of at least `least` instructions has each opcode, without suffixes."""
        return [
            Counter(self.instructions[index].name for index in loop) for loop in self.flow.loops if len(loop) >= least
        ]


def disassemble(cubin: Path) -> str:
    """Return the machine code of a file as text."""
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def parse(text: str) -> Code:
    """Parse the output of nvdisasm for a file with one kernel."""
    instructions: list[SassInstruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.fullmatch(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif found := LINE.search(line):
            operands = tuple(part.strip() for part in found[4].split(",")) if found[4] else ()
            instructions.append(SassInstruction(int(found[1], 16), found[2], found[3], operands))
    return Code(instructions, labels)


def beyond_allocation(code: Code, registers: int) -> list[str]:
    """Find instructions that name a register which their warp does not have.

    registers: of a thread at the start. `USETMAXREG` (PTX: `setmaxnreg`) changes their number.
    """
    found: dict[int, str] = {}

    def step(state: int, index: int) -> int:
        one = code.instructions[index]
        if one.name == "USETMAXREG":
            return int(one.operands[-1], 0)
        named = one.accumulators | one.operand_registers if one.is_product else one.written | one.read
        if beyond := [r for r in named if r >= state]:
            found[index] = f"{one.text[:70]}: R{max(beyond)} is beyond the {state} registers of its warp"
        return state

    code.flow.walk(registers, step)
    return [found[index] for index in sorted(found)]


def touched_before_wait(code: Code) -> list[str]:
    """Find instructions that touch a register of a product of warpgroups under way.

    Before `WARPGROUP.DEPBAR`, accumulators may not be read or written, and operands may not be written. The hardware
    does not check it; ptxas has to.
    """
    found: dict[int, str] = {}

    def step(state: tuple[Busy, ...], index: int) -> tuple[Busy, ...]:
        # The registers of each group of products, the last of which is open.
        one = code.instructions[index]
        if one.is_product:
            mine = {(False, r) for r in one.accumulators} | {(True, r) for r in one.operand_registers}
            groups = (*state[:-1], state[-1] | mine)
            if "gsb0" not in one.operands:
                return groups
            return (groups[0] | groups[1], *groups[2:], Busy()) if len(groups) > MAX_GROUPS else (*groups, Busy())
        if one.opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(one.operands[-1], 0)
            return state[max(0, len(state) - 1 - left) :]
        under_way = Busy().union(*state)
        busy = {r for _, r in under_way}
        touched = (one.written & busy) | (one.read & {r for only_writing, r in under_way if not only_writing})
        if touched:
            found[index] = f"{one.text[:70]}: touches {', '.join(f'R{r}' for r in sorted(touched)[:3])} before the wait"
        return state

    code.flow.walk((Busy(),), step)
    return [found[index] for index in sorted(found)]
