"""The text part of a model of Transformers that also takes images, sound or video."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quire.worker.engine.forward_batch import ForwardBatch, TokenEmbeddings
from quire.worker.models.transformers import trial
from quire.worker.models.transformers.config import TransformersConfig

log = logging.getLogger(__name__)


@contextmanager
def replaced_embeddings(model: Any, embeddings: TokenEmbeddings | None) -> Iterator[None]:
    """Let the model compute these embeddings in place of those of its tokens. None changes nothing.

    What the first layers get of an image is added to their outputs.
    """
    if embeddings is None:
        yield
        return

    table, rows = model.get_input_embeddings(), embeddings.rows
    own, *deep = torch.split(embeddings.values, table.embedding_dim, dim=1)
    hooks = [table.register_forward_hook(lambda _, __, output: output.index_copy(1, rows, own[None]))]
    for layer, more in zip(model.get_decoder().layers if deep else (), deep, strict=False):
        hooks.append(
            layer.register_forward_hook(lambda _, __, output, more=more: output.index_add(1, rows, more[None]))
        )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def positions_of(batch: ForwardBatch) -> torch.Tensor:
    """Return the positions of a batch: [T]; if image tokens have three axes, [4, T]: those of text, then by axis."""
    if batch.embeddings is None or batch.embeddings.axes is None:
        return batch.positions
    positions = batch.positions.repeat(4, 1)
    positions[1:, batch.embeddings.rows] = batch.embeddings.axes.t().to(positions.dtype)
    return positions


def drop_unused(model: Any, config: TransformersConfig, text: torch.Tensor) -> None:
    """Remove the towers and projectors that a text does not call, so that they take no memory.

    Only models whose configuration has a part for text are changed. text: any short text.
    """
    if config.loaded.get_text_config() is config.loaded:
        return
    called: set[nn.Module] = set()
    parents = [parent for parent in (model, getattr(model, "model", None)) if isinstance(parent, nn.Module)]
    children = [(parent, name, child) for parent in parents for name, child in parent.named_children()]
    hooks = [child.register_forward_pre_hook(lambda module, _: called.add(module)) for _, _, child in children]
    try:
        trial.by_transformers(model, [text])
    finally:
        for hook in hooks:
            hook.remove()
    dropped = [(parent, name) for parent, name, child in children if child not in called]
    for parent, name in dropped:
        setattr(parent, name, None)
    if dropped:
        names = ", ".join(sorted(name for _, name in dropped))
        log.info("a text of %s is computed without these parts, which are not kept: %s", config.architecture, names)
