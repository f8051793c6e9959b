"""Executes launches of Triton kernels as a GPU would: compiles them for Hopper, and emulates their PTX.

Tensors stay in host memory, where the emulated kernels read and write them. The code that launches kernels does not
change: it runs as with Triton's interpreter.
"""

import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.ptx.compiler import Compiler, is_descriptor
from tests.kernels.ptx.global_memory import GlobalMemory
from tests.kernels.ptx.mbarriers import TensorMap
from tests.kernels.ptx.program import Program, parse
from tests.kernels.ptx.thread_block import ThreadBlock

DESCRIPTORS, DESCRIPTOR_SIZE = 0x7A0000000000, 128  # the address of the first one; no tensor is there
FLOATS = {"fp32": "<f", "fp64": "<d"}


class Emulator:
    """Launches kernels.

    edit: may change the PTX of a kernel, by name and text, before it runs. renames: the kernels in which a `mov` of an
    accumulator of a product under way is a second name of it, as ptxas makes it, and not a fault.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._programs: dict[str, Program] = {}
        self.edit: Callable[[str, str], str] = lambda kernel, ptx: ptx
        self.renames: set[str] = set()
        self.sources: dict[str, set[str]] = {}  # the PTX of each kernel that ran, before `edit`
        self.instructions = 0  # executed in all
        self._running: list[np.ndarray] = []  # what kernels have written that may run when a dependent launch starts

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run all launches of this process here, in place of Triton's interpreter."""
        from triton.experimental.gluon._runtime import GluonJITFunction
        from triton.runtime.interpreter import InterpretedFunction

        def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.launch(function.fn, grid, list(arguments), options)

        for kind in (InterpretedFunction, GluonJITFunction):  # Gluon's kernels have no interpreter
            monkeypatch.setattr(kind, "run", run)

    def launch(self, function: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, Any]) -> None:
        """Run all programs of a launch, one after the other."""
        name = function.__name__
        compiled = self._compiler.compile(function.__module__, name, arguments, options)
        self.sources.setdefault(name, set()).add(compiled.ptx)
        text = self.edit(name, compiled.ptx)
        if text not in self._programs:
            self._programs[text] = parse(text)
        program = self._programs[text]
        names = function.__code__.co_varnames[: len(arguments)]
        given = dict(zip(names, arguments, strict=True))
        values: list[int] = []
        maps: dict[int, TensorMap] = {}
        for one, kind in compiled.signature.items():
            if is_descriptor(given[one]):
                address = DESCRIPTORS + DESCRIPTOR_SIZE * len(maps)
                maps[address] = _map_of(given[one])
                values += [address, *given[one].shape, *given[one].strides]
            else:
                values.append(_bits(given[one], kind))
        values += [0] * (len(program.parameters) - len(values))  # addresses of scratch memory; no kernel uses it
        parameters = dict(zip(program.parameters, values, strict=True))
        is_dependent = bool(options.get("launch_pdl"))
        if not is_dependent:
            self._running = []
        owners = (one.base if is_descriptor(one) else one for one in arguments)
        tensors = (one for one in owners if isinstance(one, torch.Tensor))
        memory = GlobalMemory(tensors, self._running if is_dependent else None)
        block = ThreadBlock(program, parameters, compiled.shared_bytes, memory, name in self.renames, maps)
        width, height, depth = (*grid, 1, 1)[:3]
        with np.errstate(all="ignore"):  # a GPU does not report infinite results
            for z, y, x in itertools.product(range(depth), range(height), range(width)):
                self.instructions += block.run((x, y, z), (width, height, depth))
        self._running.append(memory.written)


def _map_of(descriptor: Any) -> TensorMap:
    """Return what Triton writes into the descriptor of a matrix with a swizzle of 128 bytes. Copies take half tiles."""
    (rows, columns), (stride, one), size = descriptor.shape, descriptor.strides, descriptor.base.dtype.itemsize
    known = size == 2 and one == 1 and descriptor.padding == "zero" and descriptor.layout.swizzle_byte_width == 128
    assert known, "the emulator does not know such descriptors"
    tile = descriptor.block_shape[0], descriptor.layout.swizzle_byte_width // size
    assert not columns * size % 16, "a piece of 16 bytes would be partly outside of the matrix"
    return TensorMap(descriptor.base.data_ptr(), rows, columns, stride * size, tile)


def _bits(value: Any, kind: str) -> int:
    """Return the bits of an argument. kind: its type in Triton's signature."""
    if kind.startswith("*"):
        return int(value.data_ptr())
    if kind in FLOATS:
        return int.from_bytes(struct.pack(FLOATS[kind], value), "little")
    return int(value) & 2**64 - 1
