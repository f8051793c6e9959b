"""The emulator in place of Triton's interpreter, for tests of compiled kernels without a GPU."""

from collections.abc import Iterator

import pytest
import torch

from quire import kernels
from tests.kernels.ptx.compiler import Compiler
from tests.kernels.ptx.emulator import Emulator
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops


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


BOTH_DTYPES = [pytest.param(torch.bfloat16, id="bfloat16"), pytest.param(torch.float16, id="float16")]


@pytest.fixture(params=BOTH_DTYPES)
def emulated_ops(request: pytest.FixtureRequest, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    """The compiled Triton kernels in the emulator, in each 16-bit dtype."""
    return make_triton_ops(request.param, monkeypatch)


@pytest.fixture
def wide_ops(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    """The compiled Triton kernels in the emulator, in float32: for kernels without products of matrices."""
    return make_triton_ops(torch.float32, monkeypatch)
