"""A worker selects its device and dtype, and reports an unsuitable choice in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.shared.errors import StartError
from quire.worker.device import devices

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("name", "device"), [("auto", CUDA), ("cuda", CUDA), ("cpu", CPU)])
def test_auto_takes_a_gpu_if_there_is_one(name: str, device: torch.device) -> None:
    assert devices.choose_device(name) == device


def test_a_gpu_that_torch_cannot_use_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto") == CPU
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartError, match="install its CUDA build"):
        devices.choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(StartError, match="CUDA_VISIBLE_DEVICES"):
        devices.choose_device("cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "fp8"),
    [((9, 0), torch.bfloat16, True), ((8, 0), torch.bfloat16, False), ((7, 5), torch.float16, False)],
)
def test_a_gpu_computes_in_the_best_dtype_that_it_has(
    capability: tuple[int, int], dtype: torch.dtype, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert devices.choose_dtype("auto", CUDA) is dtype
    assert devices.choose_dtype("float32", CUDA) is torch.float32
    assert devices.has_fp8(CUDA) is fp8
    if dtype is torch.float16:
        with pytest.raises(StartError, match=r"needs compute capability 8\.0, and this GPU has 7\.5"):
            devices.choose_dtype("bfloat16", CUDA)


def test_a_cpu_computes_in_bfloat16_if_its_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.choose_dtype("float32", CPU) is torch.float32
    with pytest.raises(StartError, match="float16 is for GPUs"):
        devices.choose_dtype("float16", CPU)
    monkeypatch.setattr(kernels, "CpuOps", lambda dtype: None)
    assert devices.choose_dtype("auto", CPU) is torch.bfloat16

    def missing(dtype: torch.dtype) -> None:
        raise kernels.KernelsUnavailable("no compiler")

    monkeypatch.setattr(kernels, "CpuOps", missing)
    assert devices.choose_dtype("auto", CPU) is torch.float32


def test_the_log_names_the_card_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.describe(CPU) == "CPU"
    card = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert devices.describe(CUDA) == "NVIDIA H200 (141 GiB)"
