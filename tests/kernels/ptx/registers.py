"""The registers of threads: one row per register, one column per thread."""

import re

import numpy as np

from tests.kernels.ptx.number_formats import DTYPES, immediate
from tests.kernels.ptx.program import Program

POISON = 0x7FC07FC07FC07FC0  # what a register holds before its first write: NaN in each format


class Registers:
    """Named rows of all threads. The rows stay at their place, so that instructions keep views of them."""

    def __init__(self, program: Program, threads: int) -> None:
        self.threads = threads
        self._places: dict[str, tuple[str, int]] = {}
        numbers: dict[str, int] = {}
        for name, kind in program.registers.items():
            bank = DTYPES[kind].str
            self._places[name] = bank, numbers.get(bank, 0)
            numbers[bank] = numbers.get(bank, 0) + 1
        self._banks = {bank: np.zeros((count, self.threads), bank) for bank, count in numbers.items()}
        self.special: dict[str, np.ndarray] = {}  # "%tid.x"; filled by the block
        self.clear()

    def clear(self) -> None:
        """Fill all registers with values that no program may depend on."""
        for bank in self._banks.values():
            bank[:] = False if bank.dtype == bool else np.array(POISON, np.uint64).astype(f"u{bank.itemsize}")

    def row(self, name: str) -> np.ndarray:
        bank, number = self._places[name]
        return self._banks[bank][number]

    def rows(self, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the bank of these registers, and their numbers in it."""
        banks = {self._places[name][0] for name in names}
        assert len(banks) == 1
        return self._banks[banks.pop()], np.array([self._places[name][1] for name in names])

    def source(self, operand: str, kind: str) -> np.ndarray:
        """Return an operand as values of a type, [threads]. A wider register gives its lower bits.

        The array of a register always shows the present value.
        """
        dtype = DTYPES[kind]
        if operand in self.special:
            return self.special[operand].view(dtype)
        if not operand.startswith("%"):
            return np.full(self.threads, immediate(operand, dtype), dtype)
        row = self.row(operand)
        assert row.itemsize >= dtype.itemsize, f"{operand} is narrower than {kind}"
        return row if row.dtype == dtype else row.view(dtype)[:: row.itemsize // dtype.itemsize]

    def target(self, name: str, kind: str) -> np.ndarray:
        """Return the row that receives values of a type. A wider register is filled with zeros, or with the sign."""
        row, dtype = self.row(name), DTYPES[kind]
        if row.itemsize == dtype.itemsize:
            return row if row.dtype == dtype else row.view(dtype)
        assert row.itemsize > dtype.itemsize, f"{name} is too narrow for {kind}"
        return row.view(f"{'i' if dtype.kind == 'i' else 'u'}{row.itemsize}")


def is_register(operand: str) -> bool:
    return re.fullmatch(r"%[a-zA-Z_]\w*", operand) is not None
