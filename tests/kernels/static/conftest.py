"""The compiled kernels of this test run, and the assemblers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kernels.implementations import HAS_TRITON

Compile = Callable[..., list]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """served(capability, shape=None): the kernels of `compile_served`, compiled once in a test run."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    from tests.kernels.static.compiled import StaticKernel, compile_served

    known: dict[tuple[int, str | None], list[StaticKernel]] = {}

    def compiled(capability: int, shape: str | None = None) -> list[StaticKernel]:
        if (capability, shape) not in known:
            known[capability, shape] = compile_served(tmp_path_factory.mktemp("kernels"), capability, shape)
        return known[capability, shape]

    return compiled
