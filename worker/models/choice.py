"""Which implementation computes a checkpoint: Quire's own decoder, or Transformers."""

from __future__ import annotations

from pathlib import Path

from quire.worker.models.config import ModelConfig, read_config
from quire.worker.models.errors import NotSupported
from quire.worker.models.transformers_config import TransformersConfig, read_transformers_config

QUIRE, TRANSFORMERS, AUTO = IMPLEMENTATIONS = ("quire", "transformers", "auto")


def choose_model(folder: Path, implementation: str = AUTO) -> ModelConfig | TransformersConfig:
    """What a checkpoint is, as the implementation reads it; `auto` is Quire's own wherever that knows the model.

    Raises CheckpointError; NotSupported where the implementation does not know the model.
    """
    if implementation == TRANSFORMERS:
        return read_transformers_config(folder)
    try:
        return read_config(folder)
    except NotSupported:
        if implementation == QUIRE:
            raise
        return read_transformers_config(folder)
