"""Imitates CUDA graphs on a CPU: operations are recorded once, and replayed on the same memory.

A replay runs no Python of the model, as on a device: decisions of the host during recording are final. Allocated memory
that is not yet written holds garbage in every replay, as in a pool that graphs share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

RUBBISH = {torch.float32: float("nan"), torch.float16: float("nan"), torch.float64: float("nan")}
EMPTY = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(RUBBISH.get(tensor.dtype, 2**30))


class Recorded(TorchDispatchMode):
    """The operations of torch and the launches of Triton's interpreter, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Callable[[], None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        made = _tensors(results)
        known = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        if str(function).startswith(EMPTY):
            self._operations += [lambda one=one: _poison(one) for one in made]
        elif function._schema.is_mutable:
            self._operations.append(lambda: function(*args, **kwargs))
        elif not all(one.untyped_storage().data_ptr() in known for one in made):  # a view needs no operation
            self._operations.append(lambda: self._again(function, args, kwargs, made))
        elif not made:
            raise AssertionError(f"{function} returns a value to the host: a graph cannot")
        return results

    @staticmethod
    def _again(function: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        for old, new in zip(made, _tensors(function(*args, **kwargs)), strict=True):
            old.copy_(new)

    @contextmanager
    def launches(self):
        """Record each kernel launch inside the context as one operation."""
        run = InterpretedFunction.run

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._operations.append(lambda: run(kernel, *args, **kwargs))
            with torch.utils._python_dispatch._disable_current_modes():
                run(kernel, *args, **kwargs)

        InterpretedFunction.run = recorded
        try:
            yield
        finally:
            InterpretedFunction.run = run

    def replay(self) -> None:
        with torch.inference_mode():
            for operation in self._operations:
                operation()


def record(launch: Callable[[], None], pool: Any) -> tuple[Recorded, Any]:
    """Replace `quire.worker.device.cuda.graphs.record_on_cuda`."""
    recorded = Recorded()
    with recorded.launches(), recorded:
        launch()
    return recorded, pool
