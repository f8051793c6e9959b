"""The attention of the heads of one rank (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quire.kernels.ops import Ops
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.transformers.attention import PagedAttention
from quire.worker.models.transformers.fused_rotary import RotationTables
from quire.worker.models.transformers.parts import HeadsPart
from quire.worker.models.transformers.shapes import AttentionShape


class SplitRotations(RotationTables):
    """The rotations of a step whose attention computes some of the heads."""

    whole: tuple[torch.Tensor, torch.Tensor]  # queries and keys of all heads in the current call

    def table_for(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        return super().table_for(module, *self.whole)


class SplitAttention(PagedAttention):
    """The attention of one step, of the heads of this rank. `shapes` are those of the part."""

    def __init__(
        self,
        heads: Sequence[HeadsPart],
        ops: Ops,
        shapes: list[AttentionShape],
        batch: ForwardBatch,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        identities: dict[int, torch.Tensor],
        rotations: SplitRotations,
    ) -> None:
        """heads: of each call. All other arguments are those of PagedAttention."""
        super().__init__(ops, shapes, batch, caches, identities, rotations)
        self._heads, self._whole = iter(heads), rotations

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s_aux: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        part, self._whole.whole = next(self._heads), (q, k)
        sinks = None if s_aux is None else s_aux[part.queries]
        mixed = super().attend(module, q[:, part.queries], k[:, part.keys], v[:, part.keys], sinks, **rest)
        output = mixed.new_zeros((1, mixed.shape[1], part.num_heads, mixed.shape[3]))
        output[:, :, part.queries] = mixed
        return output if part.gathered_by is None else part.gathered_by.all_reduce(output)
