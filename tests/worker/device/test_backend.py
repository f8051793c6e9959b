"""The operations of a worker: which ones it takes, errors in one line, and the labels of its arithmetic."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.shared.process.errors import StartError
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


def test_the_triton_kernels_round_activations_and_have_the_kernel_for_hopper_if_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    monkeypatch.setattr(kernels, "triton_ops", lambda *given: given)
    for name, rounds in (("fp8", False), ("fp8-dynamic", True)):
        for hopper in (False, True):
            settings = WorkerSettings(quantization=name, hopper_prefill=hopper)
            made = backend.make_ops(settings, CUDA, torch.bfloat16)
            assert made == (CUDA, torch.bfloat16, False, False, rounds, hopper)  # type: ignore[comparison-overlap]
    with pytest.raises(StartError, match="fp8-dynamic: torch computes this model; take --quantization fp8"):
        backend.make_ops(WorkerSettings(quantization="fp8-dynamic", kernels="reference"), CUDA, torch.bfloat16)


def test_heads_that_are_too_large_for_triton_are_left_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    settings = WorkerSettings()
    assert backend.choose_kernels(settings, CUDA, torch.float32, 256) is settings
    assert backend.choose_kernels(settings, CUDA, torch.bfloat16, 512) is settings
    assert backend.choose_kernels(settings, torch.device("cpu"), torch.float32, 512) is settings  # the C++ kernels do
    assert not caplog.text
    assert backend.choose_kernels(settings, CUDA, torch.bfloat16, 528).kernels == "reference"
    caplog.clear()
    found = backend.choose_kernels(settings, CUDA, torch.float32, 512)
    assert found.kernels == "reference"
    assert "heads of 512, and the Triton kernels compute heads of up to 256 in float32: torch computes" in caplog.text
    assert backend.choose_kernels(found, CUDA, torch.float32, 512) is found
    for fields, flag in (({"kernels": "triton"}, "--kernels triton"), ({"batch_invariant": True}, "--batch-invariant")):
        with pytest.raises(StartError, match=f"{flag}: the model has heads of 512"):
            backend.choose_kernels(WorkerSettings(**fields), CUDA, torch.float32, 512)


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


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "device", "dtype", "stored", "expected"),
    [
        ({}, CPU, torch.float32, "bfloat16", torch.bfloat16),
        ({}, CPU, torch.float32, "float16", torch.bfloat16),
        ({}, CPU, torch.float32, "float32", torch.float32),
        ({}, CPU, torch.float32, None, torch.float32),
        ({}, CPU, torch.bfloat16, "bfloat16", torch.bfloat16),
        ({"dtype": "float32"}, CPU, torch.float32, "bfloat16", torch.float32),
        ({}, CUDA, torch.float16, "bfloat16", torch.float16),
        ({"kv_cache_dtype": "float32"}, CPU, torch.float32, "bfloat16", torch.float32),
        ({"kv_cache_dtype": "bfloat16"}, CPU, torch.float32, None, torch.bfloat16),
        ({"kv_cache_dtype": "int8"}, CPU, torch.bfloat16, None, torch.int8),
        ({"kv_cache_dtype": "fp8"}, CPU, torch.float32, None, torch.float8_e4m3fn),
        ({"kv_cache_dtype": "bfloat16"}, CUDA, torch.bfloat16, None, torch.bfloat16),
    ],
)
def test_the_type_of_the_cache(
    settings: dict[str, str],
    device: torch.device,
    dtype: torch.dtype,
    stored: str | None,
    expected: torch.dtype,
) -> None:
    found = backend.choose_kv_dtype(WorkerSettings(**settings), device, dtype, stored)  # type: ignore[arg-type]
    assert found is expected


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("float32", CPU, torch.bfloat16, "--kv-cache-dtype float32 is wider than the activations, bfloat16"),
        ("int8", CUDA, torch.bfloat16, "--kv-cache-dtype int8: a GPU keeps the cache in .* bfloat16, or in fp8"),
        ("bfloat16", CUDA, torch.float16, "--kv-cache-dtype bfloat16: a GPU keeps the cache in .* float16, or in fp8"),
        ("fp8", CUDA, torch.float16, "--kv-cache-dtype fp8 needs compute capability 8.9"),
    ],
)
def test_a_cache_that_the_kernels_do_not_have_is_refused(
    name: str, device: torch.device, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(StartError, match=message):
        backend.choose_kv_dtype(WorkerSettings(kv_cache_dtype=name), device, dtype, None)


@pytest.mark.parametrize("prefer", ["auto", "reference"])
@pytest.mark.parametrize("name", ["bfloat16", "int8", "fp8"])
def test_every_implementation_for_a_cpu_has_the_cache_that_is_asked_for(prefer: str, name: str) -> None:
    ops = backend.make_ops(WorkerSettings(kv_cache_dtype=name, kernels=prefer), CPU, torch.float32)
    assert ops.kv_dtype is backend.KV_DTYPES[name]
    assert backend.kv_cache_name(ops) == name, "other ranks are told the same"


def test_other_ranks_are_told_auto_if_the_cache_has_the_type_of_the_activations() -> None:
    assert backend.kv_cache_name(kernels.ReferenceOps("cpu", torch.float16)) == "auto"


@pytest.mark.slow
def test_threads_are_placed_on_the_cores_of_a_rank() -> None:
    """In a process of its own, whose CPUs change: two nodes of one core each."""
    program = """
import os, torch
from quire import kernels
from quire.worker.device import backend
from quire.worker.device.topology import Core, Topology
from quire.worker.settings import WorkerSettings

cpus = sorted(os.sched_getaffinity(0))
topology = Topology((Core((cpus[0],), 0), Core((cpus[-1],), 1)), 2)
settings = WorkerSettings(tensor_parallel_size=2)
print(backend.place_threads(settings, kernels.ReferenceOps("cpu", torch.float32), 1, topology).threads)
print(os.sched_getaffinity(0) == set(cpus))
placement = backend.place_threads(settings, kernels.CpuOps(torch.float32), 1, topology)
print(os.sched_getaffinity(0) == {cpus[-1]}, kernels.num_threads(), torch.get_num_threads(), placement.threads)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1\nTrue\nTrue 1 1 1\n", "")
