"""Every implementation that this machine runs, at every instruction-set level and in every dtype, as one fixture.

Without a GPU, Triton's kernels run in its interpreter, in an emulator of PTX, or are only compiled: gpu/, self_test/,
ptx/ and static/. CI then runs the first case of each slow test there, and `make test-all` runs all. Shapes in gpu/ are
made for the interpreter; tests that all implementations share run there with `make test-all` only.
"""

import gc
from pathlib import Path

import pytest
import torch

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
from tests.support.kernels.implementations import ON_CUDA, TRITON_DTYPES

__all__ = ["cpu_ops", "gpu_ops", "guards", "level_ops", "narrow_ops", "one_torch_thread", "ops", "seed", "threads"]


def has_param(item: pytest.Function, values: tuple[torch.dtype, ...]) -> bool:
    return hasattr(item, "callspec") and any(param in values for param in item.callspec.params.values())


HERE = Path(__file__).parent
WITHOUT_GPU = {HERE / name for name in ("gpu", "ptx", "static", "self_test")}
COMPILES = {"compiler", "served"}  # fixtures


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what compiles kernels as slow, and as soak what takes minutes without a GPU (see above)."""
    has_case: set[tuple[Path, str]] = set()
    for item in [] if ON_CUDA else items:
        if "triton-" in item.name:
            item.add_marker(pytest.mark.soak)
        if item.path.parent not in WITHOUT_GPU or not isinstance(item, pytest.Function):
            continue
        if COMPILES & {*item.fixturenames}:
            item.add_marker(pytest.mark.slow)
        elif has_param(item, TRITON_DTYPES[1:]):
            item.add_marker(pytest.mark.soak)
        if item.get_closest_marker("slow") and not item.get_closest_marker("soak"):
            test = item.path, item.originalname
            if test in has_case:
                item.add_marker(pytest.mark.soak)
            has_case.add(test)


def pytest_collection_finish() -> None:
    """Keep what was collected, millions of objects, out of searches for tensors, and out of garbage collections.

    The recorder of accesses and the emulator search at most launches; a worker collects garbage when it starts.
    """
    gc.freeze()
