"""Fixtures shared by tests of whole models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire import kernels


@pytest.fixture
def cpu_kernels() -> None:
    """Skip the test without the C++ kernels, which alone give equal bits in any batch, and memory shared by ranks."""
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread, for models so small that threads cost more time than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def thread_counts() -> Iterator[None]:
    """Restore the thread counts, which build_engine sets for the process."""
    before = torch.get_num_threads(), kernels.num_threads()
    yield
    torch.set_num_threads(before[0])
    kernels.set_num_threads(before[1])
