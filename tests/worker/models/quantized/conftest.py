"""A plain checkpoint, and quantised ones made from it."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.worker.models.files.quantized.checkpoint import QuantizedCheckpoint
from quire.worker.models.native.config import EMBEDDING, HEAD, read_config
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import quantize_checkpoint

pytest.importorskip("transformers")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_quantized(folder: Path, dtypes: tuple[torch.dtype, ...] = DTYPES) -> QuantizedCheckpoint:
    """Open a checkpoint and compare its headers, as the decoder does. Raises CheckpointError."""
    config = read_config(folder)
    assert config.quantization is not None
    checkpoint = QuantizedCheckpoint(folder, config.quantization, dtypes)
    tables = dict.fromkeys((EMBEDDING, HEAD), (config.vocab_size, config.hidden_size))
    checkpoint.check(config.tensor_shapes() | tables)
    return checkpoint


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quantized") / "source", "llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return a function from the name of a format to a checkpoint in it."""
    folder = tmp_path_factory.mktemp("formats")
    return cache(lambda name, dtype: quantize_checkpoint(plain, folder / f"{name}-{dtype}", name, dtype))


@pytest.fixture
def quantized(written, tmp_path: Path):
    """Return a function from the name of a format to a checkpoint in it, which the test may change."""

    def make(name: str, dtype: torch.dtype = torch.float32) -> Path:
        return Path(shutil.copytree(written(name, dtype), tmp_path / name))

    return make


@pytest.fixture
def read_weights(quantized):
    """Return a function from a format to pairs of weights: as the checkpoint's reader gives them, and as written."""

    def read(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        folder = quantized(name)
        checkpoint = open_quantized(folder)
        plain = load_file(folder / "plain" / "model.safetensors")
        pairs = [(checkpoint.read([at], torch.float32), plain[at]) for at in plain if checkpoint.layout(at)]
        assert len(pairs) == 14
        return pairs

    return read
