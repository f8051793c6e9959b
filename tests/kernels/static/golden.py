"""The table of what each compiled kernel takes: registers, spills, shared memory, occupancy, and its loops.

    python -m tests.kernels.static.golden              compile all kernels, and print what differs from the table
    python -m tests.kernels.static.golden --write      write the table anew, after printing the differences
    python -m tests.kernels.static.golden 90 100       only these compute capabilities

The table is compiled_kernels.tsv, of the versions in its first line. A loop is written as the number of its
instructions and of those in `compiled.NOTED`. Takes about two minutes for a compute capability.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

from tests.kernels.static.compiled import CAPABILITIES, NOTED, StaticKernel, compile_served, version

FILE = Path(__file__).with_name("compiled_kernels.tsv")
COLUMNS = ("capability", "kernel", "launch", "number", "warps", "registers", "spilled", "shared", "per_sm", "loops")
KEY = 4  # the first columns name a kernel

Row = tuple[str, ...]
Table = dict[Row, Row]  # the values of each kernel


def toolchain() -> str:
    """Return the versions on which the table depends."""
    tools = (triton.knobs.nvidia.ptxas.path, triton.knobs.nvidia.ptxas_blackwell.path)
    return f"triton {triton.__version__}, ptxas {' and '.join(version(path) for path in tools)}"


def loop_text(loop: Counter[str]) -> str:
    noted = [f"{loop[name]} {name}" for name in NOTED if loop[name]]
    return f"{loop.total()}: {', '.join(noted)}" if noted else str(loop.total())


def rows(kernels: Iterable[StaticKernel]) -> Table:
    """Return the rows of these kernels."""
    found: Table = {}
    for one in kernels:
        key = tuple(str(part) for part in one.key)
        sizes = (one.warps, one.registers, one.spilled, one.shared, one.per_multiprocessor)
        found[key] = (*map(str, sizes), "; ".join(map(loop_text, one.loops)) or "-")
    return found


def read(file: Path = FILE) -> tuple[str, Table]:
    """Return the versions of a table, and its rows."""
    head, _, *lines = file.read_text().splitlines()
    cells = [tuple(line.split("\t")) for line in lines]
    return head.removeprefix("# "), {row[:KEY]: row[KEY:] for row in cells}


def write(table: Table, file: Path = FILE) -> None:
    order = sorted(table, key=lambda key: (int(key[0]), key[1], key[2], int(key[3])))
    lines = ["\t".join((*key, *table[key])) for key in order]
    file.write_text("\n".join([f"# {toolchain()}", "\t".join(COLUMNS), *lines]) + "\n")


def differences(old: Table, new: Table) -> list[str]:
    """Return a line for each value that differs, and for each kernel that only one table has."""
    lines = []
    for key in sorted({*old, *new}):
        name = " ".join(filter(None, key))
        if key not in new or key not in old:
            lines.append(f"{name}: {'new' if key in new else 'gone'}")
            continue
        for column, before, after in zip(COLUMNS[KEY:], old[key], new[key], strict=True):
            if before != after:
                lines.append(f"{name}: {column} was {before}, is {after}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="*", default=CAPABILITIES)
    parser.add_argument("--write", action="store_true", help="replace the rows of these capabilities")
    args = parser.parse_args()
    of_table, table = read() if FILE.exists() else (toolchain(), {})
    if of_table != toolchain():
        print(f"the table is of {of_table}; here is {toolchain()}")
    kept = {key: row for key, row in table.items() if int(key[0]) not in args.capabilities}
    new = dict(kept)
    for capability in args.capabilities:
        with TemporaryDirectory() as folder:
            new |= rows(compile_served(Path(folder), capability))
    found = differences(table, new)
    print("\n".join(found) if found else "nothing differs")
    if args.write:
        write(new)
        return 0
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
