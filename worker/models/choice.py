"""Chooses the implementation that computes a checkpoint, and loads it: Quire's own decoder, or Transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.kernels import Ops
from quire.shared.model.folder import is_gguf
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.files.loader import Progress
from quire.worker.models.native.config import ModelConfig, read_config
from quire.worker.models.native.decoder import Decoder, TensorParallelGroup
from quire.worker.models.transformers.bridge import TransformersConfig, TransformersModel, read_transformers_config

# The configuration of a checkpoint, which is known before its weights are read.
Checkpoint = ModelConfig | TransformersConfig
QUIRE, TRANSFORMERS, AUTO = ("quire", "transformers", "auto")


def choose_model(folder: Path, implementation: str = AUTO) -> Checkpoint:
    """Read the configuration of a checkpoint for an implementation; `auto` prefers Quire's own decoder.

    Raises CheckpointError; NotSupported if the implementation does not support the model.
    """
    if implementation == TRANSFORMERS and not is_gguf(folder):
        return read_transformers_config(folder)
    try:
        config = read_config(folder)
    except NotSupported:
        if implementation == QUIRE:
            raise
        return read_transformers_config(folder)
    if implementation == TRANSFORMERS:
        what = f"--model-impl is {TRANSFORMERS}, but Quire's own decoder computes this GGUF file"
        raise CheckpointError(folder, what, f"give --model-impl {AUTO} or {QUIRE}")
    return config


def load_model(
    folder: Path,
    config: Checkpoint,
    ops: Ops,
    device: torch.device,
    max_model_len: int,
    read: Progress | None = None,
    packed: Progress | None = None,
    ranks: TensorParallelGroup | None = None,
    bits: int | str = 0,
) -> PagedModel:
    """Load a model in this process, or the part of one rank. Raises CheckpointError.

    read, packed: called with the bytes that are read, or packed as well, and with all bytes; Quire's own decoder packs
    weights as they are read. Other arguments are those of `Decoder.load`.
    """
    if isinstance(config, ModelConfig):
        model: PagedModel = Decoder.load(folder, ops, ops.dtype, device, max_model_len, read, ranks, bits)
    else:
        model = TransformersModel.load(config, ops, device, max_model_len, read, packed, ranks, bits)
    if config.is_wrapped and ranks is None:
        from quire.worker.models.vision.tower import find_tower  # Pillow takes memory

        own = config if isinstance(config, ModelConfig) else None
        has_axes, both_ways = own is None or bool(own.rope_axes), bool(own.both_ways) if own else None
        model.tower, model.why_no_images = find_tower(folder, ops.dtype, device, has_axes, both_ways)
    return model
