"""The memory plan of a GPU: measured steps and graphs, and errors in one line about everything that does not fit."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.shared.process.errors import StartError
from quire.worker import build, capacity
from quire.worker.capacity import choose_limits
from quire.worker.device import devices
from quire.worker.device.cuda import memory_plan
from quire.worker.device.out_of_step import OutOfStep
from quire.worker.engine.limits import EngineLimits
from quire.worker.models.native.decoder import Decoder
from quire.worker.preflight import check_weights
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels.implementations import HAS_TRITON

pytestmark = pytest.mark.slow

GIB = 1 << 30
CUDA = torch.device("cuda", 0)
MODEL = SimpleNamespace(
    ops=SimpleNamespace(device=CUDA, dtype=torch.bfloat16),
    max_model_len=4096,
    kv_bytes_per_block=lambda block_size: block_size * GIB // 1024,
    state_bytes=0,
    least_step=lambda max_num_seqs: 0,
    image_bytes=0,
    least_free_memory=lambda: Decoder.least_free_memory(MODEL),  # type: ignore[arg-type]
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB: other processes use 2, the weights 16, and torch has reserved 1 more."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - 2 * GIB - 17 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 17 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(memory_plan, "measure_graphs", lambda model, limits, record: 1 * GIB)
    monkeypatch.setattr(memory_plan, "reserve_workspace", lambda device, dtype: None)


def steps(monkeypatch: pytest.MonkeyPatch, fits: int, error: Exception) -> list[int]:
    """Make steps of more than `fits` tokens raise. Returns the sizes that are tried."""
    tried: list[int] = []

    def measure(model: object, tokens: int, rows: int, longest: int, block_size: int) -> int:
        tried.append(tokens)
        if tokens > fits:
            raise error
        return 3 * GIB

    monkeypatch.setattr(memory_plan, "measure_step", measure)
    return tried


def out_of_step(error: Exception) -> OutOfStep:
    """Return the error as several ranks raise it."""
    failure = OutOfStep("a step failed on one rank")
    failure.__cause__ = error
    return failure


def plan(**settings: object) -> memory_plan.CudaMemory:
    return memory_plan.plan_cuda_memory(WorkerSettings(gpu_memory_utilization=0.9, **settings), MODEL, 4096)  # type: ignore[arg-type]


@pytest.mark.usefixtures("card")
def test_the_cache_takes_the_memory_that_weights_step_graphs_and_other_processes_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps(monkeypatch, 8192, RuntimeError())
    assert plan() == (int(0.9 * 80 * GIB) - (2 + 16 + 3 + 1) * GIB, (80 - 2 - 16 - 3 - 1) * GIB, 8192)
    assert plan(cuda_graphs=False).cache == int(0.9 * 80 * GIB) - (2 + 16 + 3) * GIB
    monkeypatch.setattr(MODEL, "image_bytes", 5 * GIB)
    assert plan() == (int(0.9 * 80 * GIB) - (2 + 16 + 3 + 1 + 5) * GIB, (80 - 2 - 16 - 3 - 1 - 5) * GIB, 8192)


@pytest.mark.usefixtures("card")
def test_a_step_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = steps(monkeypatch, 2500, torch.OutOfMemoryError("no"))
    assert plan(max_num_seqs=8).tokens == 2048
    assert tried == [8192, 4096, 2048]


@pytest.mark.soak
@pytest.mark.usefixtures("card")
def test_if_no_step_fits_the_error_names_the_settings_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, 0, torch.OutOfMemoryError("no"))
    with pytest.raises(StartError, match=r"a step of 512 tokens .*--max-num-batched-tokens and --max-num-seqs"):
        plan(max_num_seqs=300)


@pytest.mark.usefixtures("card")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_kernel_that_does_not_fit_the_gpu_is_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    monkeypatch.setattr(build, "make_engine", lambda *_: plan())
    settings = WorkerSettings(model=str(make_checkpoint(tmp_path / "llama", "llama")), device="cpu")
    error = OutOfResources(172160, 101376, "shared memory")
    for raised in (error, out_of_step(error)):
        steps(monkeypatch, 0, raised)
        with pytest.raises(
            StartError, match=r"Required: 172160, Hardware limit: 101376.*--kernels reference"
        ) as refused:
            build.build_engine(settings, "llama")
        assert "\n" not in str(refused.value)
    steps(monkeypatch, 0, ValueError("a fault of ours"))
    with pytest.raises(ValueError, match="ours"):
        build.build_engine(settings, "llama")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("has_ranks", [False, True])
def test_an_error_of_triton_at_start_is_one_line_with_the_remedy(
    has_ranks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up is the first to launch some kernels, such as penalties."""
    from triton.runtime.errors import OutOfResources, PTXASError

    settings = WorkerSettings(model=str(make_checkpoint(tmp_path / "llama", "llama")), device="cpu")
    for error, said in (
        (OutOfResources(172160, 101376, "shared memory"), "Required: 172160, Hardware limit: 101376"),
        (
            PTXASError("`ptxas` failed\nptxas fatal   : Unsupported .version 9.5\nRepro command: ptxas a"),
            "TRITON_PTXAS_PATH",
        ),
    ):

        def fails(*_: object, error: Exception = error) -> None:
            raise out_of_step(error) if has_ranks else error

        monkeypatch.setattr(build, "warm_up", fails)
        with pytest.raises(StartError, match=f"a Triton kernel .*{said}.*--kernels reference") as refused:
            build.build_engine(settings, "llama")
        assert "\n" not in str(refused.value)


def test_swapped_blocks_pin_the_memory_that_the_log_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is neither the next power of two nor more than --swap-gb."""
    pinned: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(size) or 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    ops = kernels.ReferenceOps("cpu", torch.float32)
    model = Decoder.load(make_checkpoint(tmp_path / "llama", "llama"), ops, torch.float32, "cpu")
    asked, block = WorkerSettings(swap_gb=0.6), model.kv_bytes_per_block(16)
    monkeypatch.setattr(capacity, "available_memory", lambda: 100 * GIB)
    count = capacity.choose_num_host_blocks(asked, block, 0, 10**6, 4096)
    stack = model.ops.stack_caches(model.alloc_kv_cache(2, 16).layers)
    ops.device = CUDA
    host = ops.alloc_host_blocks(stack, count)
    ops.device = torch.device("cpu")
    assert host.nbytes == count * block
    assert pinned == [-(-count * block // 4096) * 4096]
    assert 0.59 * GIB < pinned[0] <= 0.6 * GIB + 4096


def limits(**settings: object) -> EngineLimits:
    asked = WorkerSettings(gpu_memory_utilization=0.9, **settings)  # type: ignore[arg-type]
    return choose_limits(asked, MODEL, CUDA, memory_plan.plan_cuda_memory(asked, MODEL, MODEL.max_model_len))


@pytest.mark.usefixtures("card")
def test_a_cache_that_is_too_small_names_only_remedies_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, 8192, RuntimeError())
    assert limits().num_blocks == (int(0.9 * 80 * GIB) - (2 + 16 + 3 + 1) * GIB) // (GIB // 64)
    monkeypatch.setattr(memory_plan, "measure_graphs", lambda model, limits, record: 49 * GIB)
    with pytest.raises(StartError, match=r"128 blocks .*--kv-cache-dtype fp8.*--max-model-len to 2048"):
        limits()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(memory_plan, "measure_graphs", lambda model, limits, record: 60 * GIB)
    with pytest.raises(StartError, match="a KV cache of 0 blocks") as none:
        limits()
    assert "fp8" not in str(none.value)
    assert "--max-model-len" not in str(none.value)


@pytest.mark.usefixtures("card")
def test_a_cache_of_a_given_size_must_fit_in_addition_to_step_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, 8192, RuntimeError())
    assert limits(kv_cache_gb=58).num_blocks == 58 * 64
    with pytest.raises(StartError, match=r"--kv-cache-gb 59: that takes 59.00 GiB, and 58.00 GiB are free"):
        limits(kv_cache_gb=59)
    with pytest.raises(StartError, match=r"--num-blocks 6400: that takes 100.00 GiB, and 58.00 GiB are free"):
        limits(num_blocks=6400)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path / "llama", "llama")
    model = Decoder.load(path, kernels.ReferenceOps("cpu", torch.float32), torch.float32, "cpu")
    needed = model.config.least_weight_bytes(torch.float32)
    assert needed == model.weight_bytes
    monkeypatch.setattr(devices, "available_memory", lambda: needed)
    check_weights(path, model.config, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(devices, "available_memory", lambda: needed - 1)
    with pytest.raises(StartError, match=r"llama: its weights take .* as float32, .* take --dtype bfloat16 or float16"):
        check_weights(path, model.config, torch.float32, torch.device("cpu"))
    check_weights(path, model.config, torch.float16, torch.device("cpu"))
    for bits in (8, 4):
        monkeypatch.setattr(devices, "available_memory", lambda bits=bits: needed * bits // 32)
        check_weights(path, model.config, torch.float32, torch.device("cpu"), bits=bits)
        monkeypatch.setattr(devices, "available_memory", lambda bits=bits: needed * bits // 32 - 1)
        with pytest.raises(StartError, match=f"llama: its weights take .* as int{bits}"):
            check_weights(path, model.config, torch.float32, torch.device("cpu"), bits=bits)
    # 16-bit weights stay as they are stored.
    monkeypatch.setattr(devices, "available_memory", lambda: needed // 2)
    check_weights(path, replace(model.config, dtype="bfloat16"), torch.float32, torch.device("cpu"))


def test_memory_that_runs_out_at_start_on_one_rank_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")

    def fails(*_: object) -> None:
        raise out_of_step(error)

    monkeypatch.setattr(build, "make_engine", fails)
    settings = WorkerSettings(model=str(make_checkpoint(tmp_path / "llama", "llama")), device="cpu")
    with pytest.raises(
        StartError, match=r"out of the GPU's memory at start.* lower --gpu-memory-utilization \(now 0.9"
    ):
        build.build_engine(settings, "llama")


def test_the_workspace_of_the_engines_thread_is_allocated_by_another_thread_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch passes the cuBLAS handle of a thread that has ended, with its workspace, to the next thread."""
    multiplied: list[threading.Thread] = []
    addmm = torch.addmm

    def noted(*given: torch.Tensor) -> torch.Tensor:
        multiplied.append(threading.current_thread())
        return addmm(*given)

    monkeypatch.setattr(torch, "addmm", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory_plan.reserve_workspace(torch.device("cpu"), torch.bfloat16)
    (thread,) = multiplied
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


@pytest.mark.usefixtures("card")
def test_memory_is_measured_after_that_workspace_was_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = GIB // 32
    steps(monkeypatch, 8192, RuntimeError())
    expected = plan().cache - workspace
    monkeypatch.setattr(
        memory_plan,
        "reserve_workspace",
        lambda device, dtype: monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * GIB + workspace),
    )
    assert plan().cache == expected
