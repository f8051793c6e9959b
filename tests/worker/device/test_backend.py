"""The operations of a worker: which ones it takes, errors in one line, and the labels of its arithmetic."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.shared.errors import StartError
from quire.worker.device import backend
from quire.worker.settings import WorkerSettings
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

CUDA = torch.device("cuda", 0)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_an_error_of_triton_at_its_first_launch_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's linker cache may lack libcuda."""
    from triton.backends.nvidia import driver

    import quire.kernels.gpu.ops

    def launch(*_: object) -> None:
        driver.libcuda_dirs()

    ops = make_triton_ops(torch.float32, monkeypatch)
    monkeypatch.setattr(quire.kernels.gpu.ops, "TritonOps", lambda *_, **__: ops)
    monkeypatch.setattr(ops, "argmax", launch)
    monkeypatch.setattr(driver.subprocess, "check_output", lambda *_, **__: b"")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    driver.libcuda_dirs.cache_clear()
    triton_ops = kernels.triton_ops
    monkeypatch.setattr(kernels, "triton_ops", lambda device, *rest: triton_ops(ops.device, *rest))
    with pytest.raises(StartError, match=r"--kernels auto: .*TRITON_LIBCUDA_PATH.*--kernels reference") as refused:
        backend.make_ops(WorkerSettings(), CUDA, torch.bfloat16)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("version", "is_refused"), [("3.6.0", True), ("3.7.1", False)])
def test_a_triton_that_compiles_attention_wrongly_is_refused_by_name(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(name="triton")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(kernels, "triton_ops", lambda *_: made)
    if not is_refused:
        assert backend.make_ops(WorkerSettings(), CUDA, torch.bfloat16) is made
        return
    for prefer in ("auto", "triton"):
        with pytest.raises(
            StartError, match=rf"--kernels {prefer}: triton 3.6.0 .*pip install triton==3.7.1"
        ) as refused:
            backend.make_ops(WorkerSettings(kernels=prefer), CUDA, torch.bfloat16)
        assert "\n" not in str(refused.value)
    assert backend.make_ops(WorkerSettings(kernels="reference"), CUDA, torch.bfloat16).name == "reference"


def test_a_worker_on_cuda_accumulates_matrix_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        before = getattr(matmul, name)
        try:
            setattr(matmul, name, True)
            backend.make_ops(WorkerSettings(kernels="reference"), CUDA, torch.bfloat16)
            assert getattr(matmul, name) is False
        finally:
            setattr(matmul, name, before)


def test_workers_that_may_differ_in_the_last_bits_have_different_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(ops=kernels.ReferenceOps("cpu", torch.float32), implementation="quire")
    assert backend.arithmetic_labels(own) == {  # type: ignore[arg-type]
        "model_impl": "quire",
        "dtype": "float32",
        "cache_dtype": "float32",
        "kernels": "reference",
        "device": "CPU",
        "tensor_parallel_size": "1",
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="NVIDIA H200"))
    gpu = SimpleNamespace(name="triton", dtype=torch.bfloat16, device=CUDA, row_invariant=False)
    gpu.kv_dtype = torch.float8_e4m3fn
    model = SimpleNamespace(ops=gpu, implementation="transformers")
    found = backend.arithmetic_labels(model, 4)  # type: ignore[arg-type]
    assert list(found.values()) == ["transformers", "bfloat16", "float8_e4m3fn", "triton", "NVIDIA H200", "4"]
    gpu.row_invariant = True
    assert backend.arithmetic_labels(model)["kernels"] == "triton-invariant"  # type: ignore[arg-type]


def test_kernels_of_a_cpu_are_named_with_their_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ops = kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    assert backend.kernels_name(ops) == f"cpu-{ops.level.name}"
    monkeypatch.setenv("KERNELS_CPU_ISA", "avx2")
    assert backend.kernels_name(kernels.CpuOps(torch.float32)) == "cpu-avx2"
