"""Runners: what a step sends to the device, and requests that wait for the host."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.build import build_engine
from quire.worker.device.cuda.staging import (
    ALIGNMENT,
    IN_FLIGHT,
    Staging,
    StagingField,
    padded,
    pinned_buffers,
)
from quire.worker.device.slow_choices import slow_choices
from quire.worker.engine.blocks import Copy
from quire.worker.engine.features.adapters import adapter_batch
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.runner import NOWHERE, Runner
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step
from quire.worker.engine.transfers import SampledTokens, StreamMark
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.mock_model import MockCache, MockModel

# --- the forward batch that a step becomes: tokens, positions, slots, tables and the rows whose logits are wanted -----

SIZE = 4
LIMITS = EngineLimits(
    num_blocks=16, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, num_host_blocks=4
)


def running(batch: InputBatch, tokens: int, table: list[int]) -> Sequence:
    group = SequenceGroup("r", tuple(range(10, 10 + tokens)), SamplingParams(4))
    group.start()
    batch.reserve(group, 1)
    [sequence] = group.sequences
    sequence.block_table = table
    batch.assign(sequence)
    return sequence


def test_decodes_come_first_and_chunks_follow_in_their_blocks() -> None:
    batch = InputBatch(LIMITS)
    runner = Runner(MockModel(), LIMITS, batch)
    decoding, prefilling, whole = running(batch, 6, [3, 5]), running(batch, 9, [7, 8, 9]), running(batch, 2, [1])
    prefilling.num_computed = 4
    chunks = [PrefillChunk(prefilling, 3, is_sampled=False), PrefillChunk(whole, 2, is_sampled=True)]
    built = runner._build(Step(DecodeBatch.of([decoding]), chunks))
    assert built.token_ids.tolist() == [15, 14, 15, 16, 10, 11]
    assert built.positions.tolist() == [5, 4, 5, 6, 0, 1]
    assert built.slot_mapping.tolist() == [5 * SIZE + 1, 8 * SIZE, 8 * SIZE + 1, 8 * SIZE + 2, SIZE, SIZE + 1]
    assert built.seq_lens.tolist() == [6, 7, 2]
    assert built.query_start_loc.tolist() == [0, 1, 4, 6]
    assert built.logits_rows.tolist() == [0, 5]
    assert built.block_tables.tolist() == [[3, 5], [7, 8], [1, 0]]


def test_tokens_whose_keys_are_in_the_cache_already_are_not_written_again() -> None:
    batch = InputBatch(LIMITS)
    runner = Runner(MockModel(), LIMITS, batch)
    sequence = running(batch, 8, [2, 4])
    sequence.num_computed, sequence.num_stored = 7, 8
    built = runner._build(Step(DecodeBatch.of([]), [PrefillChunk(sequence, 1, is_sampled=True)]))
    assert built.slot_mapping.tolist() == [NOWHERE]
    assert built.positions.tolist() == [7]


def test_blocks_move_out_then_in_then_between_each_other() -> None:
    runner = Runner(MockModel(), LIMITS, InputBatch(LIMITS))
    cache = runner.kv_cache
    assert isinstance(cache, MockCache)
    cache.device[:] = np.arange(16)[:, None, None]
    runner.move_blocks(
        Step(DecodeBatch.of([]), swap_out=[Copy(5, 1)], swap_in=[Copy(1, 6)], copies=[Copy(6, 7), Copy(3, 5)])
    )
    assert [int(cache.device[block, 0, 0]) for block in (5, 6, 7)] == [3, 5, 5]


# --- the adapters of a step follow the rows of its sequences ----------------------------------------------------------


class Adapter(SimpleNamespace):
    __hash__ = object.__hash__


ONE, TWO = Adapter(packed="one"), Adapter(packed="two")


def batch(adapters: list[Any]) -> Any:
    return SimpleNamespace(adapters=adapters, num_adapted=sum(one is not None for one in adapters))


def test_tokens_have_the_adapter_of_their_sequence() -> None:
    rows, starts, wanted = np.array([3, 0, 1]), np.array([0, 1, 2, 6]), np.array([0, 5, 1])
    found = adapter_batch(batch([None, TWO, None, ONE]), rows, starts, wanted)
    assert found is not None
    assert list(found.adapters) == ["one", "two"]
    assert found.tokens.tolist() == [0, -1, 1, 1, 1, 1]
    assert found.wanted.tolist() == [0, 1, -1]


def test_a_step_without_adapters_has_none() -> None:
    rows, starts, wanted = np.array([0]), np.array([0, 1]), np.array([0])
    assert adapter_batch(batch([None, None]), rows, starts, wanted) is None
    assert adapter_batch(batch([None, ONE]), rows, starts, wanted) is None


# --- staging buffers: columns reach the device in one copy, and a buffer is reused only when the device has read it ---

CPU = torch.device("cpu")
FIELDS = [
    StagingField("rows", np.int64, 3),
    StagingField("top_ps", np.float32, 3),
    StagingField("uniforms", np.float64, 3),
    StagingField("lengths", np.int32, 5),
]


def test_columns_arrive_as_they_were_sent_at_addresses_that_stay() -> None:
    staging = Staging(FIELDS, CPU)
    addresses = {name: column.data_ptr() for name, column in staging.on_device.items()}
    for first in range(2 * IN_FLIGHT):
        sent = {
            "rows": np.arange(first, first + 3),
            "lengths": np.array([first], dtype=np.int32),
            "uniforms": np.full(3, first / 8),
        }
        staging.send(sent)
        assert staging.on_device["rows"].tolist() == [first, first + 1, first + 2]
        assert staging.on_device["lengths"][:1].tolist() == [first]
        assert staging.on_device["uniforms"].tolist() == [first / 8] * 3
    assert addresses == {name: column.data_ptr() for name, column in staging.on_device.items()}


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


class Mark(StreamMark):
    """Counts how often it is waited for."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_a_buffer_is_filled_again_only_after_its_last_copy() -> None:
    staging = Staging(FIELDS, CPU)
    marks = [Mark() for _ in range(IN_FLIGHT)]
    for index, mark in enumerate(marks):
        staging._hosts[index] = (staging._hosts[index][0], mark)
    for count in range(1, 2 * IN_FLIGHT + 1):
        staging.send({})
        assert sum(mark.num_waits for mark in marks) == count
    assert [mark.num_waits for mark in marks] == [2] * IN_FLIGHT


def test_tokens_are_read_after_the_wait_and_do_not_change_with_their_buffer() -> None:
    host, mark = torch.tensor([4, 5, 6], dtype=torch.int32), Mark()
    tokens = SampledTokens(host, 2, mark).wait()
    host.zero_()
    assert (tokens.tolist(), mark.num_waits) == ([4, 5], 1)


def test_there_is_a_buffer_for_each_step_in_flight() -> None:
    buffers = pinned_buffers(4, torch.int32, CPU)
    assert len({buffer.data_ptr() for buffer, _ in buffers}) == IN_FLIGHT


def test_padding_extends_values_by_the_filler() -> None:
    assert padded(np.array([1, 2], dtype=np.int32), 4, -1).tolist() == [1, 2, -1, -1]


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
