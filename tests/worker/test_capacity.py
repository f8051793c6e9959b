"""The capacity of an engine follows from settings and free memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.shared.errors import StartError
from quire.worker import capacity
from quire.worker.capacity import CPU_CACHE_LIMIT, GIB, choose_limits, choose_num_host_blocks
from quire.worker.engine.limits import EngineLimits
from quire.worker.settings import WorkerSettings

CPU = torch.device("cpu")
MIB = 1 << 20
# A block of 16 tokens takes 16 MiB.
MODEL: Any = SimpleNamespace(max_model_len=1600, kv_bytes_per_block=lambda block_size: block_size * MIB, state_bytes=0)


def limits(monkeypatch: pytest.MonkeyPatch, free: int, **settings: Any) -> EngineLimits:
    monkeypatch.setattr(capacity, "available_memory", lambda: free)
    return choose_limits(WorkerSettings(**settings), MODEL, CPU)


def test_a_cpu_cache_is_bounded_by_a_constant_by_free_memory_and_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, 100 * GIB).num_blocks == CPU_CACHE_LIMIT // (16 * MIB)
    assert limits(monkeypatch, 6 * GIB).num_blocks == int(0.3 * 6 * GIB) // (16 * MIB)
    assert limits(monkeypatch, 100 * GIB, max_num_seqs=1).num_blocks == 100, "one sequence of a hundred blocks"


def test_a_cache_that_cannot_hold_one_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match=r"99 blocks is too small .* 100 blocks .*: raise --num-blocks, or lower"):
        limits(monkeypatch, 100 * GIB, num_blocks=99)
    remedy = "raise --kv-cache-gb, take --kv-cache-dtype int8, or lower --max-model-len to 1024"
    with pytest.raises(StartError, match=remedy):
        limits(monkeypatch, 100 * GIB, kv_cache_gb=1)


def test_a_cache_beyond_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match=r"--kv-cache-gb 4: that takes 4\.00 GiB, and 3\.00 GiB are free; lower"):
        limits(monkeypatch, 3 * GIB, kv_cache_gb=4)


def test_on_a_cpu_all_ranks_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, 100 * GIB, kv_cache_gb=4).num_blocks == 256
    assert limits(monkeypatch, 100 * GIB, kv_cache_gb=4, tensor_parallel_size=2).num_blocks == 128


def test_host_blocks_are_what_is_asked_for_what_is_free_and_what_is_needed_at_most(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def blocks(free: int, **settings: object) -> int:
        monkeypatch.setattr(capacity, "available_memory", lambda: free)
        chosen = WorkerSettings(**settings)  # type: ignore[arg-type]
        return choose_num_host_blocks(chosen, GIB // 1024, taken=GIB, sequences=10, max_model_len=1600)

    assert blocks(100 * GIB, swap_gb=0.5) == 512
    assert blocks(100 * GIB, swap_gb=4) == 1000, "ten sequences of a hundred blocks"
    assert not caplog.records
    assert blocks(2 * GIB, swap_gb=4) == 204, "a fifth of what the cache leaves"
    assert "--swap-gb 4 is more than memory allows: 0.20 GiB" in caplog.text
    assert blocks(0, swap_gb=4) == 0
    assert blocks(100 * GIB, swap_gb=0) == 0
    assert blocks(100 * GIB, preemption="recompute") == 0


# A state takes 64 MiB, a block of 16 tokens 16 MiB.
STATEFUL: Any = SimpleNamespace(
    max_model_len=160, kv_bytes_per_block=lambda block_size: block_size * MIB, state_bytes=64 * MIB
)


def stateful(monkeypatch: pytest.MonkeyPatch, free: int, **settings: Any) -> EngineLimits:
    monkeypatch.setattr(capacity, "available_memory", lambda: free)
    return choose_limits(WorkerSettings(**settings), STATEFUL, CPU)


def test_states_take_half_of_the_memory_for_caches_and_bound_the_sequences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = stateful(monkeypatch, 100 * GIB)
    assert (found.num_state_slots, found.max_num_seqs, found.num_blocks) == (16, 8, 64)
    assert "half of the memory for caches has room for the recurrent states of 8 sequences at once" in caplog.text
    assert stateful(monkeypatch, 100 * GIB, prefix_caching=False).max_num_seqs == 16
    few = stateful(monkeypatch, 100 * GIB, max_num_seqs=1, state_gb=8)
    assert (few.max_num_seqs, few.num_state_slots) == (1, 128)
    many = stateful(monkeypatch, 100 * GIB, state_gb=8)
    assert (many.max_num_seqs, many.num_state_slots) == (64, 128)
    assert stateful(monkeypatch, 100 * GIB, max_num_seqs=16).max_num_seqs == 16, "no slots for snapshots"


def test_settings_of_states_that_cannot_be_honoured_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StartError, match=r"room for the recurrent states of 16 .* of 64.0 MiB: raise --state-gb, or lo"
    ):
        stateful(monkeypatch, 100 * GIB, max_num_seqs=17)
    with pytest.raises(
        StartError, match=r"--state-gb 0.01 has room for the recurrent states of 0 .*: raise --state-gb$"
    ):
        stateful(monkeypatch, 100 * GIB, state_gb=0.01)
    with pytest.raises(StartError, match=r"--state-gb 8: 4\.00 GiB are free; lower it"):
        stateful(monkeypatch, 4 * GIB, state_gb=8)
    with pytest.raises(StartError, match="--snapshot-tokens 40 must be a multiple of --block-size 16"):
        stateful(monkeypatch, 100 * GIB, snapshot_tokens=40)
    for name, value in (("state_gb", 1), ("snapshot_tokens", 128)):
        with pytest.raises(
            StartError, match=f"--{name.replace('_', '-')} {value}: the model keeps no recurrent states"
        ):
            limits(monkeypatch, 100 * GIB, **{name: value})
