"""The emulator in place of Triton's interpreter, for tests of compiled kernels without a GPU."""

from collections.abc import Iterator

import pytest

from tests.kernels.ptx.compiler import Compiler
from tests.kernels.ptx.emulator import Emulator
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed, or does not interpret kernels")
    if ON_CUDA:
        pytest.skip("the kernels run on the GPU itself")
    one = Compiler()
    yield one
    one.close()


@pytest.fixture
def emulator(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """Launches of this test run in the emulator."""
    emulator = Emulator(compiler)
    emulator.install(monkeypatch)
    return emulator
