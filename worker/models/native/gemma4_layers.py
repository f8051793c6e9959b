"""Computations that only Gemma 4 has: inputs of the layers for each token, and tokens in place of others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.ops import Ops, PackedLinear, PerLayerInput
from quire.worker.models.files.weight_reader import WeightReader
from quire.worker.models.native.config import INPUT_EMBEDDING, INPUT_NORM, INPUT_PROJECTION, ModelConfig


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """The inputs that layers have besides the hidden state, for each token (Gemma 4, per-layer embeddings).

    inputs = (norm(projection(embedding) / sqrt(hidden)) + entry of the table * sqrt(width)) / sqrt(2)
    """

    table: torch.Tensor  # [V, layers * width]
    projection: PackedLinear  # [hidden] -> [layers * width]
    norm: torch.Tensor  # [width]
    eps: float

    @classmethod
    def load(cls, reader: WeightReader, eps: float) -> PerLayerEmbeddings:
        projection = reader.linear([INPUT_PROJECTION])
        return cls(reader.embedding(INPUT_EMBEDDING), projection, reader.norm(INPUT_NORM), eps)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.projection.nbytes + self.norm.nbytes

    def compute(self, ops: Ops, token_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the inputs [T, layers, width]. embeddings [T, hidden], as the first layer has them."""
        width = len(self.norm)
        projected = ops.linear(embeddings, self.projection).mul_(embeddings.shape[1] ** -0.5)
        projected = ops.rms_norm(projected.view(len(embeddings), -1, width), self.norm, self.eps)
        own = scaled(ops.embed(token_ids, self.table), width**0.5)
        return projected.add_(own.view_as(projected)).mul_(2**-0.5)


def load_layer_input(reader: WeightReader, prefix: str) -> PerLayerInput:
    """Load the end of a layer that adds its own input. prefix: such as `model.layers.0`."""
    gate, projection = (f"{prefix}.{name}.weight" for name in ("per_layer_input_gate", "per_layer_projection"))
    norm = reader.norm(f"{prefix}.post_per_layer_input_norm.weight")
    return PerLayerInput(reader.linear([gate]), reader.linear([projection]), norm)


def computed_as(config: ModelConfig) -> torch.Tensor:
    """Return the token as which each token is computed, int32 [V]."""
    tokens = torch.arange(config.vocab_size, dtype=torch.int32)
    tokens[list(config.placeholders)] = config.pad_token_id
    return tokens


def scaled(embeddings: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply embeddings in place, and return them. Transformers rounds the scale to the type of activations."""
    return embeddings.mul_(torch.tensor(scale, dtype=embeddings.dtype).item())
