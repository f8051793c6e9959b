"""Every implementation that this machine runs, at every instruction-set level and in every dtype, as one fixture.

In Triton's interpreter, tests that all implementations share run with `-m soak` only, because the interpreter is slow.
The tests in gpu/ have shapes for the interpreter and always run.
"""

import pytest

from tests.support.kernels.fixtures import (
    cpu_ops,
    gpu_ops,
    guards,
    level_ops,
    narrow_ops,
    one_torch_thread,
    ops,
    seed,
    threads,
)
from tests.support.kernels.implementations import ON_CUDA

__all__ = ["cpu_ops", "gpu_ops", "guards", "level_ops", "narrow_ops", "one_torch_thread", "ops", "seed", "threads"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as soak that take minutes in the interpreter: their shapes are too large for it."""
    for item in [] if ON_CUDA else items:
        if "triton-" in item.name:
            item.add_marker(pytest.mark.soak)
