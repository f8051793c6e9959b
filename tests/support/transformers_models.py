"""Loads checkpoints with Transformers, for tests of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.worker.models.errors import CheckpointError
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import read_transformers_config


def load(path: Path, max_model_len: int = 0, dtype: torch.dtype = torch.float32) -> TransformersModel:
    ops = kernels.select_ops("cpu", dtype)
    return TransformersModel.load(read_transformers_config(path), ops, "cpu", max_model_len)


def refusal(path: Path, max_model_len: int = 0) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, max_model_len)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said
