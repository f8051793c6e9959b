"""The memory of a GPU is planned by what a step takes, and what does not fit is told in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.conftest import HAS_TRITON
from worker import devices
from worker.errors import StartError
from worker.settings import WorkerSettings

GIB = 1 << 30
MODEL = SimpleNamespace(ops=SimpleNamespace(device=torch.device("cuda", 0)))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which others use 2, the weights 16, and torch has set 1 aside beside these."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - 2 * GIB - 17 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 17 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(devices, "measure_graphs", lambda model, limits: 1 * GIB)


def steps(monkeypatch: pytest.MonkeyPatch, fits: int, error: Exception) -> list[int]:
    """Steps of more than `fits` tokens raise; returns the sizes that are tried."""
    tried: list[int] = []

    def measure(model: object, tokens: int, rows: int, longest: int, block_size: int) -> int:
        tried.append(tokens)
        if tokens > fits:
            raise error
        return 3 * GIB

    monkeypatch.setattr(devices, "measure_step", measure)
    return tried


def plan(**settings: object) -> tuple[int, int]:
    return devices.plan_cuda_memory(WorkerSettings(gpu_memory_utilization=0.9, **settings), MODEL, 4096)  # type: ignore[arg-type]


@pytest.mark.usefixtures("card")
def test_the_cache_takes_what_weights_step_graphs_and_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, 8192, RuntimeError())
    assert plan() == (int(0.9 * 80 * GIB) - (2 + 16 + 3 + 1) * GIB, 8192)
    assert plan(cuda_graphs=False)[0] == int(0.9 * 80 * GIB) - (2 + 16 + 3) * GIB


@pytest.mark.usefixtures("card")
def test_a_step_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = steps(monkeypatch, 2500, torch.OutOfMemoryError("no"))
    assert plan(max_num_seqs=8)[1] == 2048
    assert tried == [8192, 4096, 2048]


@pytest.mark.usefixtures("card")
def test_where_no_step_fits_the_settings_to_lower_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, 0, torch.OutOfMemoryError("no"))
    with pytest.raises(StartError, match=r"a step of 512 tokens .*--max-num-batched-tokens and --max-num-seqs"):
        plan(max_num_seqs=300)


@pytest.mark.usefixtures("card")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_kernel_that_does_not_fit_the_gpu_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    steps(monkeypatch, 0, OutOfResources(172160, 101376, "shared memory"))
    with pytest.raises(StartError, match=r"Required: 172160, Hardware limit: 101376.*--kernels reference"):
        plan()
    steps(monkeypatch, 0, ValueError("a fault of ours"))
    with pytest.raises(ValueError, match="ours"):
        plan()
