"""Compiles the launches of the product for a GPU that this machine need not have, and keeps PTX and machine code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

from tests.kernels.ptx import program
from tests.kernels.static import sass
from tests.kernels.static.occupancy import blocks_per_multiprocessor

ROOT = Path(__file__).parents[3]
CAPABILITIES = (80, 89, 90, 100, 120)
# Kernels with long loops, on which the speed of serving depends. The table has the instructions of their loops.
LOOPING = (
    "decode_kernel",
    "prefill_kernel",
    "hopper_prefill_kernel",
    "matmul_kernel",
    "one_row_kernel",
    "few_rows_kernel",
    "grouped_matmul_kernel",
    "grouped_kernel",
)
# Opcodes of the table: products, exponentials, conversions, copies, shared memory, barriers, and spilled registers.
NOTED = (
    *("HGMMA", "HMMA", "UTCHMMA", "LDTM", "STTM"),
    *("MUFU", "F2F", "F2FP", "PRMT"),
    *("UTMALDG", "LDGSTS", "LDG", "LDSM", "LDS", "STS", "STSM", "SHFL", "BAR"),
    *("LDL", "STL"),
)


@dataclass(frozen=True)
class StaticKernel:
    """A compiled kernel.

    number: tells kernels of one name and launch apart, in the order of their launches. A kernel that several launches
    use belongs to the first of them.
    """

    capability: int
    name: str
    launch: str  # shapes and modes of the launch that compiled it
    number: int
    warps: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a block
    file: Path  # without its suffix

    def __str__(self) -> str:
        return " ".join(str(part) for part in self.key if part != "")

    @property
    def key(self) -> tuple[int, str, str, int]:
        return self.capability, self.name, self.launch, self.number

    @cached_property
    def ptx(self) -> str:
        return self.file.with_suffix(".ptx").read_text()

    @cached_property
    def program(self) -> program.Program:
        return program.parse(self.ptx)

    @cached_property
    def code(self) -> sass.Code:
        return sass.parse(sass.disassemble(self.file.with_suffix(".cubin")))

    @property
    def per_multiprocessor(self) -> int:
        return blocks_per_multiprocessor(self.capability, self.warps, self.registers, self.shared)

    @property
    def loops(self) -> list[Counter[str]]:
        return self.code.loops() if self.name in LOOPING else []


SHORT = "bf16 d64 32/8 page16 window0 invariant"
# In place of a shape: each kernel once, in the shape SHORT if it has one.
ONCE = "once"


def compile_served(folder: Path, capability: int, shape: str | None = None) -> list[StaticKernel]:
    """Compile all kernels for the shapes of models that Quire serves; shape: only attention of this one."""
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_cuda", "--capability", str(capability)]
    modes = {None: ["--served"], ONCE: ["--once", "--shape", SHORT]}
    chosen = modes.get(shape, ["--shape", shape])
    command += ["--keep", str(folder), *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not [line for line in lines if "error" in line], "a kernel does not compile"
    columns = ("kernel", "for", "number", "warps", "registers", "spilled", "shared")
    return [StaticKernel(capability, *(line[name] for name in columns), folder / line["file"]) for line in lines]


# --- assemblers -------------------------------------------------------------------------------------------------------


def assemblers() -> dict[str, str]:
    """Return the versions of ptxas and their paths: both that Triton brings, and the one that TEST_PTXAS names."""
    paths = [triton.knobs.nvidia.ptxas.path, triton.knobs.nvidia.ptxas_blackwell.path]
    if other := os.environ.get("TEST_PTXAS"):
        paths.append(other)
    return {version(path): path for path in paths}


def version(path: str) -> str:
    """Return the version of a ptxas: "12.8.93"."""
    said = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    assert found, f"{path} does not say its version: {said}"
    return found[1]


@contextmanager
def assembled(ptx: str, capability: int, ptxas: str) -> Iterator[Path]:
    """Assemble a kernel with the options of Triton. Yields the file with its machine code."""
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [ptxas, "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={name}", str(source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        yield target
