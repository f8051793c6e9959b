"""Runners: the adapters of a step, buffers that reach the device, and settings that are slow."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.worker.build import build_engine
from quire.worker.device.cuda.staging import ALIGNMENT, Staging, StagingField
from quire.worker.device.slow_choices import slow_choices
from quire.worker.engine.features.adapters import adapter_batch
from quire.worker.engine.transfers import StreamMark
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint

# --- the adapters of a step follow the rows of its sequences ----------------------------------------------------------


class Adapter(SimpleNamespace):
    __hash__ = object.__hash__


ONE, TWO = Adapter(packed="one"), Adapter(packed="two")


def batch(adapters: list[Any]) -> Any:
    return SimpleNamespace(adapters=adapters, num_adapted=sum(one is not None for one in adapters))


def test_a_step_without_adapters_has_none() -> None:
    rows, starts, wanted = np.array([0]), np.array([0, 1]), np.array([0])
    assert adapter_batch(batch([None, None]), rows, starts, wanted) is None
    assert adapter_batch(batch([None, ONE]), rows, starts, wanted) is None


# --- columns of staging buffers, and the wait for the device ----------------------------------------------------------

CPU = torch.device("cpu")
FIELDS = [
    StagingField("rows", np.int64, 3),
    StagingField("top_ps", np.float32, 3),
    StagingField("uniforms", np.float64, 3),
    StagingField("lengths", np.int32, 5),
]


def test_columns_are_aligned_and_have_their_types() -> None:
    columns = Staging(FIELDS, CPU).on_device
    start = min(column.data_ptr() for column in columns.values())
    assert all((column.data_ptr() - start) % ALIGNMENT == 0 for column in columns.values())
    assert {name: column.dtype for name, column in columns.items()} == {
        "rows": torch.int64,
        "top_ps": torch.float32,
        "uniforms": torch.float64,
        "lengths": torch.int32,
    }


def test_a_thread_that_waits_for_a_gpu_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of CUDA lets the thread spin, unless it is asked to block."""
    made: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options))
    StreamMark(torch.device("cuda", 0))
    assert made == [{"blocking": True}]


# --- a setting that names something slow is said at start in one line, with the faster choice; no other setting is ----


class Ops(SimpleNamespace):
    """Stands for the C++ kernels of one level."""


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the types of activations for which the C++ kernels run here."""

    def has(*dtypes: torch.dtype) -> None:
        class CpuOps(Ops):
            def __init__(self, dtype: torch.dtype, **fields: Any) -> None:
                if dtype not in dtypes:
                    raise kernels.KernelsUnavailable("not here")
                super().__init__(dtype=dtype, device=torch.device("cpu"), **fields)

        monkeypatch.setattr(kernels, "CpuOps", CpuOps)

    return has


def lines(
    stored: str | None = "bfloat16",
    has_integers: bool = False,
    level: str = "avx512bf16",
    device: str = "cpu",
    **settings: Any,
) -> list[str]:
    ops: Any = kernels.CpuOps(torch.float32, level=SimpleNamespace(name=level))  # type: ignore[call-arg]
    ops.device = torch.device(device)
    return slow_choices(WorkerSettings(**settings), ops, stored, has_integers)


def test_defaults_are_silent(processor: Any) -> None:
    processor(torch.float32, torch.bfloat16)
    for stored in ("bfloat16", "float32", None):
        assert lines(stored) == []
        assert lines(stored, has_integers=True, quantization="int8") == []


def test_float32_for_weights_of_16_bits(processor: Any) -> None:
    processor(torch.float32, torch.bfloat16)
    assert lines("float32", dtype="float32") == []
    [line] = lines("float16", dtype="float32")
    assert line.startswith("--dtype float32 is slow here: the weights are float16")
    assert line.endswith("--dtype auto takes them")
    [line] = lines(dtype="float32", has_integers=True, quantization="int4")
    assert "--dtype float32 keeps the KV cache in float32" in line
    assert lines(dtype="float32", has_integers=True, kv_cache_dtype="bfloat16") == []
    processor(torch.float32)
    [line] = lines(dtype="float32")
    assert "--dtype auto keeps the cache in bfloat16" in line
    assert lines(dtype="float32", kv_cache_dtype="int8") == []


def test_plain_torch_where_the_kernels_run(processor: Any) -> None:
    processor(torch.float32)
    [line] = lines(kernels="reference")
    assert "--kernels reference is slow" in line
    assert "--kernels auto" in line
    ops: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    assert slow_choices(WorkerSettings(kernels="reference"), ops, None, False) == []


def test_formats_that_save_memory_alone(processor: Any) -> None:
    processor(torch.float32, torch.bfloat16)
    [line] = lines(quantization="fp8")
    assert line.startswith("--quantization fp8 saves memory")
    assert "--quantization int8 is faster" in line
    [line] = lines(kv_cache_dtype="int8", level="amx")
    assert "--kv-cache-dtype int8 saves memory" in line
    # docs/benchmarks.md: at these levels 8 bits of keys and values cost no time.
    assert lines(kv_cache_dtype="int8", level="avx512") == lines(kv_cache_dtype="fp8") == []


def test_nothing_is_said_of_a_gpu(processor: Any) -> None:
    processor(torch.float32, torch.bfloat16)
    assert lines(device="cuda", dtype="float32", quantization="fp8", kernels="reference") == []


def test_a_worker_logs_the_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=1, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    with caplog.at_level(logging.WARNING):
        build_engine(WorkerSettings(model=str(path), device="cpu", quantization="fp8", num_blocks=32), "test")
    torch.set_num_threads(threads)
    assert [one.message for one in caplog.records if "--quantization fp8" in one.message]
