"""Checks of PTX that need no execution. Each returns its findings as lines; an empty list is a pass."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from tests.kernels.ptx.program import Instruction, Program, in_braces
from tests.kernels.static.flow import NEXT, Flow, Jump

WARPGROUP_WARPS = 4
LANES = 32
MAX_GROUPS = 8  # of products under way that are told apart; a wait leaves at most 7


def flow_of(program: Program) -> Flow:
    """Return the control flow of a program."""
    jumps = []
    for one in program.instructions:
        if one.parts[0] == "bra":
            jumps.append(Jump(program.labels[one.operands[0]], one.guard is not None))
        elif one.parts[0] == "brx":
            first, *others = (program.labels[name] for name in program.tables[one.operands[1]])
            jumps.append(Jump(first, False, tuple(others)))
        elif one.parts[0] in ("ret", "exit", "trap"):
            jumps.append(Jump(None, one.guard is not None))
        else:
            jumps.append(NEXT)
    return Flow.of(jumps, list(program.labels.values()))


# --- registers of products under way ----------------------------------------------------------------------------------


class UnderWay(NamedTuple):
    """Registers that asynchronous instructions use: of products not committed yet, of each group, and of loads."""

    open: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = ()
    loaded: frozenset[str] = frozenset()


def touched_before_wait(program: Program) -> list[str]:
    """Find instructions that name a register which an asynchronous instruction still uses.

    PTX leaves such an access undefined: of accumulators, and of an operand in registers, before `wgmma.wait_group`; of
    the target of `tcgen05.ld` before `tcgen05.wait::ld`. A further product may name the accumulators of its chain.
    """
    products = [one for one in program.instructions if one.opcode.startswith("wgmma.mma_async")]
    results = frozenset(name for one in products for name in in_braces(one.operands[0]))
    found: dict[int, str] = {}

    def step(state: UnderWay, index: int) -> UnderWay:
        one = program.instructions[index]
        if one.opcode.startswith("wgmma.mma_async"):
            accumulators = frozenset(in_braces(one.operands[0]))
            operand = frozenset(in_braces(one.operands[1])) if one.operands[1].startswith("{") else frozenset()
            if operand & results & state.open.union(*state.groups):
                found[index] = f"{one.text[:60]}: its operand is the result of a product under way"
            return state._replace(open=state.open | accumulators | operand)
        if one.opcode.startswith("wgmma.commit_group"):
            groups = (*state.groups, state.open)
            if len(groups) > MAX_GROUPS:  # in a loop without a wait; a wait frees old groups before newer ones
                groups = (groups[0] | groups[1], *groups[2:])
            return state._replace(open=frozenset(), groups=groups)
        if one.opcode.startswith("wgmma.wait_group"):
            left = int(one.operands[0])
            return state._replace(groups=state.groups[len(state.groups) - left :] if left else ())
        if one.opcode.startswith("tcgen05.wait::ld"):
            return state._replace(loaded=frozenset())
        if touched := one.registers & (state.open.union(*state.groups) | state.loaded):
            found[index] = f"{one.text[:60]}: touches {', '.join(sorted(touched)[:3])} before the wait"
        if one.opcode.startswith("tcgen05.ld"):
            return state._replace(loaded=state.loaded | frozenset(in_braces(one.operands[0])))
        return state

    flow_of(program).walk(UnderWay(), step)
    return [found[index] for index in sorted(found)]


# --- shared memory that another warpgroup may still read --------------------------------------------------------------

SHARED_WRITES = re.compile(r"cp\.async\.c[ag]|st\.shared|stmatrix|atom\.shared|red\.shared")


class Groups(NamedTuple):
    """The groups of products of a warpgroup."""

    running: int = 0
    is_awaited: bool = False  # the warpgroup has waited for a group, and no barrier has followed


def written_without_barrier(program: Program) -> list[str]:
    """Find writes to shared memory between the wait for a product and the next barrier, in blocks of 8 warps.

    `wgmma.wait_group` waits for the products of its own warpgroup. Until the next barrier, the product of the other
    warpgroup may still read its operands from shared memory.
    """
    if program.threads <= 32 * WARPGROUP_WARPS:
        return []
    found: dict[int, str] = {}

    def step(state: Groups, index: int) -> Groups:
        one = program.instructions[index]
        if one.opcode.startswith("wgmma.commit_group"):
            return state._replace(running=min(state.running + 1, MAX_GROUPS))
        if one.opcode.startswith("wgmma.wait_group"):
            left = min(state.running, int(one.operands[0]))
            return Groups(left, state.is_awaited or state.running > left)
        if is_barrier(one):
            return state._replace(is_awaited=False)
        if state.is_awaited and SHARED_WRITES.match(one.opcode):
            found[index] = f"{one.text[:60]}: no barrier since the wait for a product"
        return state

    flow_of(program).walk(Groups(), step)
    return [found[index] for index in sorted(found)]


# --- branches that depend on the thread -------------------------------------------------------------------------------


class Varies(IntEnum):
    """Which threads of a block may have different values of a register."""

    NOT = 0
    BETWEEN_WARPS = 1
    WITHIN_WARPS = 2


def is_barrier(one: Instruction) -> bool:
    """Return whether all threads of a block meet at this instruction."""
    return one.opcode.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.red"))


def meets_in_warp(one: Instruction) -> bool:
    """Return whether all threads of a warp meet at this instruction, as `mma.sync`, `ldmatrix.sync` and `shfl.sync`."""
    return "sync" in one.parts


def divided_barriers(program: Program, trusts_sums: bool = False) -> list[str]:
    """Find barriers that not all threads reach alike, because a branch before them depends on the thread.

    A value is taken to differ if it is computed from one that does, and if it is written under such a branch. A load
    from one address gives all threads one value.

    trusts_sums: a value that is combined with the one of another lane (`shfl.sync.bfly`, `redux.sync`) is taken to be
    complete, and so the same in all threads. The check cannot tell a complete sum from a partial one.
    """
    flow, instructions = flow_of(program), program.instructions
    varies: dict[str, Varies] = {"%tid.x": Varies.WITHIN_WARPS, "%laneid": Varies.WITHIN_WARPS}
    thread_numbers = {"%tid.x"} | {
        one.operands[0] for one in instructions if one.parts[0] == "mov" and one.operands[1] == "%tid.x"
    }
    block_of = [number for number, block in enumerate(flow.blocks) for _ in block]
    under = [Varies.NOT] * len(flow.blocks)  # of the branches that decide a block

    def operands(one: Instruction) -> Varies:
        names = set(re.findall(r"%[\w.]+", one.text)) - one.written
        return max((varies.get(name, Varies.NOT) for name in names), default=Varies.NOT)

    sums = lane_sums(program) if trusts_sums else set()
    changed = True
    while changed:
        changed = False
        for index, one in enumerate(instructions):
            new = Varies.NOT if one.written & sums else operands(one)
            if one.parts[0] == "bra" and one.guard is not None:
                for decided in flow.decides[block_of[index]]:
                    if new > under[decided]:
                        under[decided], changed = new, True
                continue
            if one.parts[0] in ("elect", "atom"):
                new = Varies.WITHIN_WARPS
            elif new is Varies.WITHIN_WARPS and is_of_warp(one, thread_numbers):
                new = Varies.BETWEEN_WARPS
            new = max(new, under[block_of[index]])
            for name in one.written:
                if new > varies.get(name, Varies.NOT):
                    varies[name], changed = new, True
    found = []
    for index, one in enumerate(instructions):
        guard = varies.get(one.guard or "", Varies.NOT)
        level = max(under[block_of[index]], guard)
        is_of_block = is_barrier(one) or one.parts[0] == "wgmma"
        if (is_of_block and level) or (meets_in_warp(one) and level is Varies.WITHIN_WARPS):
            found.append(f"{one.text[:60]}: not all threads reach it alike")
    return found


def lane_sums(program: Program) -> set[str]:
    """Return the registers with values of other lanes, and those that combine them with values of their own lane."""
    from_lanes: set[str] = set()
    found: set[str] = set()
    for one in program.instructions:
        sources = one.registers - one.written
        if one.opcode.startswith(("shfl.sync.bfly", "redux.sync")) or (sources and sources <= from_lanes):
            from_lanes |= one.written  # exchanged, or both halves of a number put together
        elif sources & from_lanes:
            found |= one.written
    return from_lanes | found


def is_of_warp(one: Instruction, thread_numbers: set[str]) -> bool:
    """Return whether all threads of a warp get one result: the number of their warp, or the value of one lane."""
    if one.opcode.startswith("shfl.sync.idx"):
        return one.operands[2].isdigit()
    if len(one.operands) < 3 or one.operands[1] not in thread_numbers or not one.operands[2].isdigit():
        return False
    number = int(one.operands[2])
    if one.parts[0] == "shr":
        return number >= LANES.bit_length() - 1
    return (one.parts[0] == "and" or one.opcode in ("setp.lt.u32", "setp.gt.u32")) and not (
        (number + (one.opcode == "setp.gt.u32")) % LANES
    )
