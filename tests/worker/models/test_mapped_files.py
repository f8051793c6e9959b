"""Pages of mapped files leave the memory of the process, and their values stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quire.worker.models.mapped_files import MappedFiles
from tests.support.resident_memory import resident

MIB = 1 << 20


@pytest.fixture
def mapped(tmp_path: Path) -> tuple[MappedFiles, torch.Tensor, torch.Tensor]:
    """Return a file of 40 MiB, a tensor in it and its values. All of it is resident."""
    values = torch.arange(10 * MIB, dtype=torch.float32).view(-1, 1024)
    save_file({"values": values, "other": torch.ones(3)}, tmp_path / "weights.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "weights.safetensors")
    file = tmp_path / "link.safetensors"
    tensor = safe_open(file, framework="pt", device="cpu").get_tensor("values")
    assert torch.equal(tensor, values)
    return MappedFiles([file]), tensor, values


def file_pages() -> int:
    return resident()["RssFile"]


def test_a_tensor_leaves_the_memory_and_keeps_its_values(
    mapped: tuple[MappedFiles, torch.Tensor, torch.Tensor],
) -> None:
    files, tensor, values = mapped
    before = file_pages()
    files.release(tensor[:2560])
    assert before - file_pages() == pytest.approx(10 * MIB, abs=MIB)
    files.release(tensor[:, :100])  # rows of it have gaps
    assert before - file_pages() == pytest.approx(40 * MIB, abs=MIB)
    assert torch.equal(tensor, values)
    files.release_all()
    assert before - file_pages() == pytest.approx(40 * MIB, abs=MIB)
    assert torch.equal(tensor, values)


def test_other_memory_is_left_alone(mapped: tuple[MappedFiles, torch.Tensor, torch.Tensor]) -> None:
    files, tensor, values = mapped
    copy = tensor.clone()
    files.release(copy)
    files.release(torch.empty(0))
    assert torch.equal(copy, values)


def test_a_file_that_was_written_to_is_not_released_as_a_whole(
    mapped: tuple[MappedFiles, torch.Tensor, torch.Tensor],
) -> None:
    files, tensor, _ = mapped
    tensor[5, 5] = -1
    files.release_all()
    assert float(tensor[5, 5]) == -1
