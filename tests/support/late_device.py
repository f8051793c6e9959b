"""A stand-in for a GPU that runs every operation as late as possible: only when the host waits for it.

A runner that reuses a buffer too soon, or reads a result too early, gives wrong texts occasionally on a GPU, and always
on this device. Tensors claim to be on CUDA and lie in host memory, poisoned until their operation has run. A copy reads
and writes pinned host memory when it runs, not when it is launched. Graphs record launches and repeat them on the same
memory.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
FACTORIES = (torch.zeros, torch.empty, torch.arange, torch.tensor)
POISON = 0x55


class LateTensor(torch.Tensor):
    """A tensor of the late device. memory: holds the values once the operation has run."""

    memory: torch.Tensor
    late: LateDevice

    @staticmethod
    def __new__(cls, memory: torch.Tensor, late: LateDevice) -> LateTensor:
        tensor: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device="meta",  # torch built without CUDA creates no CUDA tensor
        )
        tensor.memory, tensor.late = memory, late
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def __repr__(self, **_: Any) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype})"

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.late.to_host(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        late = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, LateTensor)).late
        with torch.inference_mode(False):  # the runner takes views of tensors created outside of it
            return late.launch(func, args, kwargs)


class LateDevice(TorchFunctionMode):
    """The device. draw: if given, some operations run at random times before the host waits for them.

    num_waits: how often the host waited for the device. num_replays: number of graphs replayed.
    """

    def __init__(self, draw: random.Random | None = None) -> None:
        super().__init__()
        self._waiting: deque[Callable[[], Any]] = deque()
        self._recorded: list[Callable[[], Any]] | None = None
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no address is used twice
        self._draw = draw
        self.num_submitted = self.num_done = 0
        self.num_waits = self.num_replays = 0

    # --- the queue ----------------------------------------------------------------------------------------------------

    def submit(self, run: Callable[[], Any]) -> None:
        if self._recorded is not None:
            self._recorded.append(run)
            return
        self._waiting.append(run)
        self.num_submitted += 1
        if self._draw is not None and self._draw.random() < 0.1:
            self._run(self._draw.randint(self.num_done, self.num_submitted))

    def wait(self, until: int | None = None) -> None:
        """Run all submitted operations, or the first `until` of them, as the host waits."""
        assert self._recorded is None, "the host waits for the device while a graph is recorded"
        self.num_waits += 1
        self._run(self.num_submitted if until is None else until)

    def _run(self, until: int) -> None:
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            while self.num_done < until:
                self._waiting.popleft()()
                self.num_done += 1

    def record(self, launch: Callable[[], None], pool: Any) -> tuple[LateGraph, Any]:
        """Record a graph; stands in for `quire.worker.device.graphs.record_on_cuda`."""
        self._recorded = []
        try:
            launch()
            return LateGraph(self, self._recorded), pool
        finally:
            self._recorded = None

    # --- memory -------------------------------------------------------------------------------------------------------

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> LateTensor:
        return self._poisoned(torch.empty(size, dtype=dtype, device="meta"))

    def _poisoned(self, like: torch.Tensor) -> LateTensor:
        with torch._C.DisableTorchFunction():
            memory = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
            if memory.numel():
                memory.untyped_storage().fill_(POISON if like.dtype != torch.bool else 1)
            return LateTensor(memory, self)

    def to_host(self, tensor: LateTensor) -> torch.Tensor:
        self.wait()
        return tensor.memory.clone()

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(tensor.untyped_storage().data_ptr())
        self._kept.append(tensor)
        return tensor

    # --- operations ---------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept the functions that create tensors on the device or in pinned memory."""
        kwargs = dict(kwargs or {})
        if func in FACTORIES:
            is_pinned = kwargs.pop("pin_memory", False)
            on_device = torch.device(kwargs.get("device") or "cpu").type == "cuda"
            made = func(*args, **kwargs | {"device": "cpu"})
            if on_device:
                return LateTensor(made, self)
            return self._pin(made) if is_pinned else made
        if func is torch.Tensor.pin_memory:
            return self._pin(args[0].clone())
        if func is torch.Tensor.to and not isinstance(args[0], LateTensor) and CUDA.type in str(args[1]):
            sent = self._poisoned(args[0].to("meta"))
            return sent.copy_(args[0], non_blocking=kwargs.get("non_blocking", False))
        return func(*args, **kwargs)

    def call(self, result: LateTensor, compute: Callable[..., torch.Tensor], *inputs: Any) -> LateTensor:
        """Launch one kernel, which computes `result` from the memory of its inputs."""
        memory = [one.memory if isinstance(one, LateTensor) else one for one in inputs]
        self.submit(lambda: fill(result, compute(*memory)))
        return result

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Launch one of torch's own operations."""
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.to_host(args[0]).item()
        leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        assert all(isinstance(one, LateTensor) or not one.dim() for one in leaves), f"{func}: not all on the device"
        within, options = tree_map(lambda one: one.memory if isinstance(one, LateTensor) else one, (args, kwargs))
        changes = [one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments]
        if any(changes):
            self.submit(lambda: func(*within, **options))
            return args[changes.index(True)]
        if any(one.alias_info is not None for one in func._schema.returns):
            found = func(*within, **options)
            # A view reads no values. An operation that may return a view but did not, such as `to`, runs later.
            if not isinstance(found, torch.Tensor) or share_memory(found, args[0].memory):
                return tree_map(lambda one: LateTensor(one, self), found)
        shapes = func(*tree_map(as_meta, args), **tree_map(as_meta, kwargs))
        results = tree_map(self._poisoned, shapes)
        self.submit(lambda: tree_map(fill, results, func(*within, **options)))
        return results

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        to, of = (one.memory if isinstance(one, LateTensor) else one for one in (target, source))
        hosts = [one for one in (target, source) if not isinstance(one, LateTensor)]
        self.submit(lambda: to.copy_(of))
        if hosts and not (non_blocking and self._is_pinned(hosts[0])):
            self.wait()
        return target


def fill(result: LateTensor, values: torch.Tensor) -> None:
    result.memory.copy_(values)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and (value.dim() or isinstance(value, LateTensor)):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return value


class LateGraph:
    def __init__(self, late: LateDevice, operations: list[Callable[[], Any]]) -> None:
        self._late, self._operations = late, operations

    def replay(self) -> None:
        self._late.num_replays += 1
        for operation in self._operations:
            self._late.submit(operation)


class LateEvent:
    """Stands in for torch.cuda.Event."""

    late: LateDevice

    def __init__(self, blocking: bool = False) -> None:
        self._at = 0

    def record(self, stream: object) -> None:
        self._at = self.late.num_submitted

    def query(self) -> bool:
        return self.late.num_done >= self._at

    def synchronize(self) -> None:
        self.late.wait(self._at)


@contextmanager
def late_device(draw: random.Random | None = None) -> Iterator[LateDevice]:
    """Create a late device; torch puts all CUDA tensors on it inside this context."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        late = stack.enter_context(LateDevice(draw))
        patch.setattr(torch.cuda, "Event", type("Event", (LateEvent,), {"late": late}))
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.cuda, "synchronize", lambda *_: late.wait())
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        yield late
