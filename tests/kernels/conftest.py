"""Every implementation that this machine runs, at every instruction-set level and in every type, as one fixture.

The Triton kernels run on a CUDA device where there is one, and else in Triton's interpreter, which is slow: there the
tests that all implementations share run with `-m soak`, and test_gpu_*.py, with shapes made for it, always.
"""

import importlib.util
import os

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.library import LEVELS
from quire.kernels.cpu.memory import Arena
from tests.kernels.accesses import Accesses
from tests.kernels.guarded import guarded
from tests.kernels.interpreter import patch_once

ON_CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not ON_CUDA:
    # Read when functions are decorated, Triton's own among them; so it must not have been imported before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import quire.kernels.gpu
    import triton

    HAS_TRITON = not isinstance(triton.language.sum, triton.JITFunction)
    if HAS_TRITON:
        patch_once()
        Accesses().install()
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_TRITON else ()


def implementations() -> list:
    found = [pytest.param(("reference", "", dtype), id=f"reference-{dtype}") for dtype in LEVELS]
    for dtype, levels in LEVELS.items():
        found += [pytest.param(("cpu", level.name, dtype), id=f"cpu-{level.name}") for level in levels]
    found += [pytest.param(("triton", "", dtype), id=f"triton-{dtype}") for dtype in TRITON_DTYPES]
    return found


def of_each_kind() -> list:
    """The C++ kernels at every level, and one of the others each: for what no type of activations matters to."""
    again = {"reference-torch.bfloat16", "triton-torch.float16", "triton-torch.bfloat16"}
    return [param for param in implementations() if param.id not in again]


def make_ops(kind: str, level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    if kind == "reference":
        return kernels.ReferenceOps("cpu", dtype)
    if kind == "triton":
        return make_triton_ops(dtype, monkeypatch)
    monkeypatch.setenv("KERNELS_CPU_ISA", level)
    try:
        ops = kernels.CpuOps(dtype)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    if ops.level.name != level:
        pytest.skip(f"this processor has no {level}")
    return ops


def make_triton_ops(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **options: object
) -> "quire.kernels.gpu.TritonOps":
    from quire.kernels.gpu import TritonOps

    if ON_CUDA:
        torch.set_default_device("cuda")  # where tests make their tensors; `seed` undoes it
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return TritonOps("cuda" if ON_CUDA else "cpu", dtype, check_ids=True, **options)


@pytest.fixture(params=TRITON_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def gpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> "quire.kernels.gpu.TritonOps":
    """The Triton kernels alone, always."""
    return make_triton_ops(request.param, monkeypatch)


@pytest.fixture(params=implementations())
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops(*request.param, monkeypatch)


@pytest.fixture(params=[p for p in implementations() if p.values[0][0] == "cpu"])
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops(*request.param, monkeypatch)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)
    if not ON_CUDA:
        torch.use_deterministic_algorithms(True)  # what torch.empty gives is NaN, or the largest number
    yield
    torch.set_default_device(None)
    if ON_CUDA:
        end_if_lost()
    else:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C++ kernel that reads or writes outside of its weights or caches ends the process."""
    monkeypatch.setattr(Arena, "take", lambda arena, size, apart=False: guarded(size))


def end_if_lost() -> None:
    """After an error on the device every later call in this process fails: pytest-xdist starts another process, so that
    one kernel's error is not that of all tests behind it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(3)  # what the test said was sent before
        raise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the interpreter runs on shapes that were not made for it takes minutes: `-m soak`."""
    for item in [] if ON_CUDA else items:
        if "triton-" in item.name:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    """The tensors are small: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fewer(ops: kernels.Ops, count: int) -> int:
    """Rows for a test that draws many: a twentieth where every row is interpreted."""
    return count // 20 if ops.name == "triton" and not ON_CUDA else count


@pytest.fixture
def threads():
    """Sets the number of kernel threads for one test."""
    try:
        before = kernels.num_threads()
    except kernels.KernelsUnavailable:  # no compiler: the other kernels have no threads to set
        yield lambda count: None
        return
    yield kernels.set_num_threads
    kernels.set_num_threads(before)
