"""RoPE at positions with three axes (M-RoPE, arXiv 2409.12191): time, height and width of tokens of images.

Each pair of dimensions turns by the position on one axis. A token of text has the same position on all axes, so that
its rotation is a row of the usual table. The rotations of image tokens are composed of rows of the table, and take
rows after its end for one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.worker.engine.forward_batch import TokenEmbeddings

# Image tokens that one step may compute.
MAX_TOKENS = 16_384


class ImageRope:
    """A table of rotations with rows for the image tokens of a step."""

    def __init__(self, cos_sin: torch.Tensor, axes: Sequence[int]) -> None:
        """cos_sin [positions, D]: for text. axes: that of each pair of dimensions."""
        self._num_positions = len(cos_sin)
        self._axes = torch.tensor([*axes, *axes], device=cos_sin.device)  # of cosines and sines
        self.table = torch.cat([cos_sin, cos_sin.new_zeros(MAX_TOKENS, cos_sin.shape[1])])

    def place(self, positions: torch.Tensor, embeddings: TokenEmbeddings) -> torch.Tensor:
        """Return positions [T] at which the table has the rotations of these image tokens as well."""
        rows, axes = embeddings.rows, embeddings.axes
        assert axes is not None
        if len(rows) > MAX_TOKENS:
            raise ValueError(f"a step has {len(rows)} image tokens, more than {MAX_TOKENS}")
        first, end = self._num_positions, self._num_positions + len(rows)
        self.table[first:end] = self.table.gather(0, axes[:, self._axes])
        return positions.index_copy(0, rows, torch.arange(first, end, dtype=positions.dtype, device=positions.device))
