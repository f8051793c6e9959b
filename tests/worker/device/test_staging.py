"""Staging buffers: columns reach the device in one copy, and a buffer is reused only when the device has read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.worker.device.staging import (
    ALIGNMENT,
    IN_FLIGHT,
    SampledTokens,
    Staging,
    StagingField,
    StreamMark,
    padded,
    pinned_buffers,
)

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
