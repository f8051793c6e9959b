"""The input of a model for one step: the tokens of all scheduled sequences, one sequence after the other."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from quire.kernels import Interrupt
from quire.kernels.ops import AdapterBatch
from quire.worker.engine.transfers import send

ON_HOST = ("state_slots", "snapshots", "adapters", "interrupt", "embeddings")


class TokenEmbeddings(NamedTuple):
    """Embeddings that take the places of those of tokens, on the device."""

    rows: torch.Tensor  # int64 [N], indices of the tokens
    # [N, H], in the type of the activations; [N, H + n * H] if more is added to the outputs of the first n layers
    values: torch.Tensor
    axes: torch.Tensor | None = None  # int64 [N, 3], positions on the axes of RoPE; None: those of the batch
    # int32 [N], the position after the last key that the token sees; None: after its own
    key_ends: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences.

    Sequence s has the tokens query_start_loc[s] .. query_start_loc[s + 1] - 1. The tokens in the batch are the last of
    the sequence's seq_lens[s] tokens; the KV cache holds all tokens before them. The key and the value of a token are
    written to its slot: physical block * block size + offset in the block.
    """

    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T], from 0
    slot_mapping: torch.Tensor  # int32 [T]
    block_tables: torch.Tensor  # int32 [S, max_blocks]; entries after a sequence's last block are never read
    seq_lens: torch.Tensor  # int32 [S], length of the context including this step
    query_start_loc: torch.Tensor  # int32 [S + 1]
    logits_rows: torch.Tensor  # int64 [R], indices of the tokens whose logits are computed
    pooled_rows: torch.Tensor | None = None  # int64 [P], indices of the tokens whose hidden states are returned
    # Only for models with recurrent states (`KVCache.states`), and always on the host:
    state_slots: torch.Tensor | None = None  # int64 [S], the slot of each sequence
    # int64 [N, 3]: sequence, number of its tokens in the batch after which its state is copied, slot of the copy
    snapshots: torch.Tensor | None = None
    adapters: AdapterBatch | None = None  # of the tokens, if any uses one
    # Ends the computation early if it is requested. Models that cannot end early ignore it.
    interrupt: Interrupt | None = None
    embeddings: TokenEmbeddings | None = None  # of image tokens

    def parts(self) -> list[torch.Tensor]:
        """Return all tensors but those of `ON_HOST`, in the order of the fields, without an absent `pooled_rows`."""
        names = [field.name for field in fields(self) if field.name not in ON_HOST]
        return [part for name in names if (part := getattr(self, name)) is not None]

    def to(self, device: torch.device) -> ForwardBatch:
        """Copy the batch to a device, as `send` does."""
        parts: list[Any] = [send(part, device) for part in self.parts()]
        sent = ForwardBatch(*parts)
        return replace(sent, **{name: getattr(self, name) for name in ON_HOST})
