"""Every implementation that this machine runs, at every instruction-set level and in every type, as one fixture."""

import pytest
import torch

import kernels
from kernels.cpu.library import LEVELS


def implementations() -> list:
    found = [pytest.param(("reference", "", dtype), id=f"reference-{dtype}") for dtype in LEVELS]
    for dtype, levels in LEVELS.items():
        found += [pytest.param(("cpu", level.name, dtype), id=f"cpu-{level.name}") for level in levels]
    return found


def make_ops(kind: str, level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    if kind == "reference":
        return kernels.ReferenceOps("cpu", dtype)
    monkeypatch.setenv("KERNELS_CPU_ISA", level)
    try:
        ops = kernels.CpuOps(dtype)
    except kernels.Unavailable as missing:
        pytest.skip(str(missing))
    if ops.level.name != level:
        pytest.skip(f"this processor has no {level}")
    return ops


@pytest.fixture(params=implementations())
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops(*request.param, monkeypatch)


@pytest.fixture(params=[p for p in implementations() if p.values[0][0] == "cpu"])
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops(*request.param, monkeypatch)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    """The tensors are small: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads():
    """Sets the number of kernel threads for one test."""
    before = kernels.num_threads()
    yield kernels.set_num_threads
    kernels.set_num_threads(before)
