"""Gains and shifts that an adapter applies to the outputs of a linear layer: DoRA, and biases.

DoRA (Liu et al., 2024) gives each row of the merged weights W + s B A the length m, so outputs without the bias are
multiplied by m / |row of W + s B A|. These lengths do not depend on the input. They are computed when the adapter is
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.lora.base_weights import CHUNK, BaseWeights
from quire.worker.models.files.lora.tensors import AGAIN, EMBEDDING, ModuleTensors


def gains_of(
    path: Path,
    module: str,
    tensors: ModuleTensors,
    factors: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    base: BaseWeights,
    output_factor: float = 1.0,
) -> torch.Tensor:
    """Return `LoraPart.gains` of a module, float32 [2, N].

    factors: A [rank, K] and B [N, rank]; scale: of their product. output_factor: what the layer multiplies its outputs
    by, as for an FP8 cache. Raises CheckpointError.
    """
    magnitude, added, changed = tensors.get("magnitude"), tensors.get("bias of B"), tensors.get("bias")
    a, b = factors
    gain = torch.ones(len(b))
    if magnitude is not None:
        own = tensors.get("weight")  # replaces that of the model
        lengths = _column_lengths if module == EMBEDDING else _row_lengths
        size = (a.shape[1], len(b)) if module == EMBEDDING else (len(b), a.shape[1])
        chunks = base.chunks(module, size[1], size[0]) if own is None else _chunks(own)
        found = lengths(chunks, a.float(), b.float(), scale)
        if not bool((found > 0).all()):
            what = f"tensor {tensors.parts['magnitude'][0]}: a row of the merged weights has the length 0"
            raise CheckpointError(path, what, AGAIN)
        gain = magnitude.float() / found
    shift = torch.zeros(len(b))
    if (bias := base.bias(module)) is not None:  # the outputs have it before they are multiplied
        shift += bias - gain * bias
    if changed is not None:
        shift += changed.float() - (bias if bias is not None else 0.0)
    if added is not None:
        shift += gain * scale * added.float()
    return torch.stack([gain, shift * output_factor])


def _chunks(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    step = max(1, CHUNK // weight.shape[1])
    for first in range(0, len(weight), step):
        yield slice(first, first + step), weight[first : first + step].float()


def _row_lengths(
    chunks: Iterator[tuple[slice, torch.Tensor]], a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the lengths of the rows of W + scale B A, [N]."""
    return torch.cat([torch.linalg.vector_norm(rows + scale * (b[at] @ a), dim=1) for at, rows in chunks])


def _column_lengths(
    chunks: Iterator[tuple[slice, torch.Tensor]], a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the lengths of the columns of an embedding table W + scale (B A)^T, [H]."""
    squares = torch.zeros(len(b), dtype=torch.float64)
    for at, rows in chunks:
        squares += (rows + scale * (a[:, at].T @ b.T)).double().square_().sum(dim=0)
    return squares.sqrt_().float()
