"""Launches of Triton kernels on simulated devices: Triton's interpreter computes them, in the order of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

# Imports Triton so that it interprets kernels, and corrects the interpreter, if no device was simulated before.
from tests.support.kernels.implementations import HAS_TRITON
from tests.support.simulated_cuda.tensors import SimulatedTensor, memory_of

if TYPE_CHECKING:
    from tests.support.simulated_cuda.driver import Driver


def replace_launches(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run kernels on simulated tensors when their stream reaches them."""
    if not HAS_TRITON:
        return
    from triton.runtime.interpreter import GridExecutor

    patch.setenv("TRITON_INTERPRET", "1")  # Triton reads it again at a launch
    call = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, SimulatedTensor)]
        if not tensors:
            call(executor, *args, **kwargs)
            return
        within, options = [memory_of(one) for one in args], {name: memory_of(one) for name, one in kwargs.items()}
        driver.stream_of(tensors[0].allocation.device).submit(lambda: call(executor, *within, **options))

    patch.setattr(GridExecutor, "__call__", launch)
