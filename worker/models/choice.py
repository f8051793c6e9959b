"""Chooses the implementation that computes a checkpoint: Quire's own decoder, or Transformers."""

from __future__ import annotations

from pathlib import Path

from quire.shared.model.folder import is_gguf
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.models.native.config import ModelConfig, read_config
from quire.worker.models.transformers.bridge import TransformersConfig, read_transformers_config

# The configuration of a checkpoint, which is known before its weights are read.
Checkpoint = ModelConfig | TransformersConfig
QUIRE, TRANSFORMERS, AUTO = ("quire", "transformers", "auto")


def choose_model(folder: Path, implementation: str = AUTO) -> Checkpoint:
    """Read the configuration of a checkpoint for an implementation; `auto` prefers Quire's own decoder.

    Raises CheckpointError; NotSupported if the implementation does not support the model.
    """
    if is_gguf(folder):  # also refused by name: another architecture, which Transformers might know
        if implementation == TRANSFORMERS:
            what = f"--model-impl is {TRANSFORMERS}, but Quire's own decoder computes GGUF files"
            raise CheckpointError(folder, what, f"give --model-impl {AUTO} or {QUIRE}")
        return read_config(folder)
    if implementation == TRANSFORMERS:
        return read_transformers_config(folder)
    try:
        return read_config(folder)
    except NotSupported:
        if implementation == QUIRE:
            raise
        return read_transformers_config(folder)
