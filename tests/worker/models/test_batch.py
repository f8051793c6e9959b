"""A batch keeps the order of its parts, and copies to a CPU share memory."""

from __future__ import annotations

import torch

from quire.worker.models.batch import ForwardBatch, send


def test_parts_are_in_the_order_of_the_fields() -> None:
    tensors = [torch.full((number + 1,), number) for number in range(7)]
    batch = ForwardBatch(*tensors)
    assert all(part is tensor for part, tensor in zip(batch.parts(), tensors, strict=True))
    assert batch.logits_rows is tensors[-1]
    moved = batch.to(torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(moved.parts(), tensors, strict=True))


def test_pooled_rows_are_the_last_part_if_there_are_any() -> None:
    tensors = [torch.full((number + 1,), number) for number in range(8)]
    batch = ForwardBatch(*tensors)
    assert batch.parts()[-1] is batch.pooled_rows is tensors[-1]
    assert torch.equal(batch.to(torch.device("cpu")).parts()[-1], tensors[-1])


def test_nothing_is_copied_on_a_cpu() -> None:
    values = torch.arange(4)
    assert send(values, torch.device("cpu")).data_ptr() == values.data_ptr()
