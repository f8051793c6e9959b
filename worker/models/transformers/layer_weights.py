"""The weights of linear layers as they are packed for a model that Transformers computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.weights import LinearWeight


class LayerWeights:
    """The weights of linear layers as they are packed: without quantisation as they are."""

    has_integers = False  # true if products round activations to 8 bits

    def tensors(self) -> dict[str, Tensor] | None:
        """Return all tensors of the checkpoint as numbers, by their names; None if Transformers reads them itself.

        Raises CheckpointError.
        """
        return None

    def kind(self, weight: Tensor) -> object:
        """Return how these weights [N, K] are quantised: an object that is equal for weights that can be joined."""
        return None

    def joined(self, weights: Sequence[Tensor]) -> LinearWeight:
        """Return weights [N, K] of layers with the same input as those of one layer, along N."""
        return weights[0].contiguous() if len(weights) == 1 else torch.cat(list(weights))

    def finish(self) -> None:
        """Log how all layers were packed, and free the codes."""


AS_THEY_ARE = LayerWeights()
