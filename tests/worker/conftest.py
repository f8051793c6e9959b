"""What tests of whole models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire import kernels


@pytest.fixture
def cpu_kernels() -> None:
    """For promises that the C++ kernels give and plain torch does not: equal bits in any batch, and memory that ranks
    share."""
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models that are so small that threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
