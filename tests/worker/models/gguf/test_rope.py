"""The divisors that a GGUF file stores give the frequencies of the parameters that they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.ops.tools.gguf_writer import write_gguf
from quire.worker.models.config import read_config
from quire.worker.models.errors import CheckpointError
from quire.worker.models.rope import inverse_frequencies


def test_the_frequencies_of_llama_3_are_those_of_the_checkpoint(gguf_files) -> None:  # type: ignore[no-untyped-def]
    folder, file = gguf_files("llama3-rope")
    rope = read_config(file).rope
    assert len(rope.divisors) == 16
    assert max(rope.divisors) == 8
    expected = inverse_frequencies(read_config(folder).rope, 32)
    torch.testing.assert_close(inverse_frequencies(rope, 32), expected, rtol=1e-6, atol=0)


def test_divisors_for_another_head_size_are_refused(gguf_files, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, _ = gguf_files("llama3-rope")
    sizes = {f"llama__{key}": 64 for key in ("attention__key_length", "attention__value_length")}
    file = write_gguf(folder, tmp_path / "a.gguf", **sizes, llama__rope__dimension_count=64)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has 16 numbers, expected 32"):
        read_config(file)
