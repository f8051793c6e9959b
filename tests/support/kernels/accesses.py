"""Finds memory accesses in Triton's interpreter that would be wrong on a GPU: races, and accesses outside of tensors.

The interpreter runs the programs of a launch one after the other, and completes each operation before the next. On a
GPU, programs run in parallel, and so do the threads of a program, which synchronise only where the kernel says so. This
module records every address, byte by byte, and raises an AssertionError that names the kernel if

- a program accesses memory that belongs to no tensor,
- a program reads or writes memory that another program of the launch writes,
- a program reads memory that it has written (these kernels have no barrier), or writes memory twice,
- a program writes memory that it has read with fewer values than it has threads: several threads read the same value
  then, and a late thread may find the new value,
- a program reads or writes memory that a program of the launch changes atomically. Atomic operations may meet.
- a program of a dependent launch (`launch_pdl`) ends without waiting for the kernel before it, writes before that wait,
  or reads before it what a kernel has written that may still run: one of the dependent launches before it, or the last
  launch of another kind.

The masked lanes of a load without `other` are undefined on a GPU. Here they are NaN or the largest number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.kernels.living_tensors import living_tensors

THREADS_OF_WARP, DEFAULT_WARPS = 32, 4


class Accesses:
    """The accesses of the current launch."""

    def __init__(self) -> None:
        self._begin(np.empty((0, 2), np.int64), 0, False)
        self._chain: list[np.ndarray] = []  # what kernels have written that may still run

    def install(self) -> None:
        """Watch all launches of the interpreter in this process from now on."""
        from triton.runtime import interpreter
        from triton.runtime.errors import InterpreterError

        from quire.kernels.gpu.few_rows import dependent_launch

        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, place = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
        change = builder.create_atomic_rmw
        launch, to_host = executor.__call__, executor._init_args_hst

        def watched_load(self_: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
            self.read(ptrs, mask)
            if other is None:
                type_ = ptrs.get_element_ty()
                other = interpreter.TensorHandle(_garbage(ptrs.data.shape, interpreter._get_np_dtype(type_)), type_)
            return load(self_, ptrs, mask, other, *rest)

        def watched_store(self_: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.write(ptrs, mask)
            return store(self_, ptrs, value, mask, *rest)

        def watched_change(self_: Any, operation: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.change(ptrs, mask)
            return change(self_, operation, ptrs, value, mask, *rest)

        def watched_place(self_: Any, *index: int) -> None:
            self.next_program()
            place(self_, *index)

        def watched_arguments(self_: Any, *arguments: Any) -> Any:
            positional, named = to_host(self_, *arguments)
            self._begin(_extents([*positional, *named.values()]), self._launch_threads, self._launch_is_dependent)
            return positional, named

        def watched_launch(self_: Any, *arguments: Any, **named: Any) -> Any:
            warps = named.get("num_warps", DEFAULT_WARPS)
            self._launch_is_dependent = named.get("launch_pdl", False)
            self._launch_threads = THREADS_OF_WARP * warps if warps > 1 else 0  # the threads of one warp load together
            try:
                launch(self_, *arguments, **named)
                self.finish()
            except (AssertionError, InterpreterError) as error:
                # The interpreter wraps exceptions of a kernel in its own exceptions.
                cause: BaseException = error
                while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
                    cause = cause.__cause__
                if not isinstance(cause, AssertionError):
                    raise
                raise AssertionError(f"{self_.fn.__name__}: {cause}") from error

        builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
        builder.create_atomic_rmw = watched_change
        builder.set_grid_idx, executor.__call__ = watched_place, watched_launch
        executor._init_args_hst = watched_arguments
        dependent_launch.gdc_wait, dependent_launch.gdc_launch_dependents = self.wait, lambda: None

    def _begin(self, extents: np.ndarray, threads: int, is_dependent: bool) -> None:
        self._extents = extents  # [n, 2]: first byte of each tensor, and the byte after its last
        self._threads = threads
        self._is_dependent, self._has_waited = is_dependent, True
        if not is_dependent:
            self._chain = []
        self._read: list[np.ndarray] = []
        self._shared: list[np.ndarray] = []  # the reads that several threads have made
        self._written: list[np.ndarray] = []
        self._changed: list[np.ndarray] = []  # atomically, by all programs
        self._reads: list[np.ndarray] = []  # of each finished program
        self._writes: list[np.ndarray] = []

    def wait(self) -> None:
        self._has_waited = True

    def read(self, ptrs: Any, mask: Any) -> None:
        touched = self._bytes(ptrs, mask)
        if not self._has_waited:
            for written in self._chain:
                assert not np.isin(touched, written).any(), "a program reads a result before it waits for it"
        for written in self._written:
            assert not np.isin(touched, written).any(), "a program reads what it has written"
        self._read.append(touched)
        if ptrs.data.size < self._threads:
            self._shared.append(touched)

    def write(self, ptrs: Any, mask: Any) -> None:
        assert self._has_waited, "a program writes before it waits for the kernel before it"
        touched = self._bytes(ptrs, mask)
        assert len(np.unique(touched)) == len(touched), "one store writes to a place twice"
        for written in self._written:
            assert not np.isin(touched, written).any(), "a program writes to a place twice"
        for read in self._shared:
            assert not np.isin(touched, read).any(), "a program writes where several of its threads have read"
        self._written.append(touched)

    def change(self, ptrs: Any, mask: Any) -> None:
        self._changed.append(np.unique(self._bytes(ptrs, mask)))

    def next_program(self) -> None:
        self._reads.append(_unique(self._read))
        self._writes.append(_unique(self._written))
        self._read, self._shared, self._written = [], [], []
        assert self._has_waited, "a program does not wait for the kernel before it"
        self._has_waited = not self._is_dependent

    def finish(self) -> None:
        self.next_program()
        self._has_waited = True
        written, writer = _flat(self._writes)
        self._chain.append(written)
        order = np.argsort(written, kind="stable")
        written, writer = written[order], writer[order]
        assert not (written[1:] == written[:-1]).any(), "two programs write to one place"
        read, reader = _flat(self._reads)
        if len(written):
            at = np.minimum(np.searchsorted(written, read), len(written) - 1)
            assert not ((written[at] == read) & (writer[at] != reader)).any(), "a program reads what another one writes"
        changed = _unique(self._changed)
        assert not np.isin(changed, np.concatenate([read, written])).any(), "an atomic operation meets another access"

    def _bytes(self, ptrs: Any, mask: Any) -> np.ndarray:
        """Return the addresses of all bytes that an operation accesses."""
        first = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)].astype(np.int64).reshape(-1)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        self._check_owned(first, size)
        return (first[:, None] + np.arange(size)).reshape(-1)

    def _check_owned(self, first: np.ndarray, size: int) -> None:
        if not len(first):
            return
        if _all_inside(first, size, self._extents):
            return
        # The kernel may have read the addresses of tensors from another tensor.
        self._extents = _extents(living_tensors())
        assert _all_inside(first, size, self._extents), "a program touches what belongs to no tensor"


def _garbage(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return values for the masked lanes of a load without `other`."""
    return np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max, dtype)


def _extents(tensors: list[Any]) -> np.ndarray:
    """Return the memory of tensors, [n, 2]: begin and end, in ascending order, without overlaps."""
    storages = [one.untyped_storage() for one in tensors if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    found = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages if one.nbytes()})
    return np.array(found, np.int64).reshape(-1, 2)


def _all_inside(first: np.ndarray, size: int, extents: np.ndarray) -> bool:
    if not len(extents):
        return False
    at = np.searchsorted(extents[:, 0], first, side="right") - 1
    return bool(((at >= 0) & (first + size <= extents[at, 1])).all())


def _unique(parts: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def _flat(programs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses of all programs, and the program of each address."""
    owners = [np.full(len(one), number, np.int64) for number, one in enumerate(programs)]
    return np.concatenate(programs), np.concatenate(owners)
