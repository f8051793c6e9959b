"""Changes that adapters make before the first layer of a decoder and after the last: to embeddings and logits.

An adapter may have an embedding table or a head of its own, or some rows of them, and low-rank factors of both. Rows of
tokens without an adapter are those of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.lora import AdapterBatch, NormsOfLayer, rows_of
from quire.kernels.ops import Ops, PackedAdapter, PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWithEnds:
    """A packed adapter with rows of embedding table and head of its own.

    table [n, H], of `Ops.weight_dtypes`: embeddings of the tokens table_ids, int64 [n] in ascending order, or of all
    tokens if these are None. head: of `Ops.pack_linear`, logits of the tokens head_ids likewise.
    """

    packed: PackedAdapter
    table: Tensor | None = None
    table_ids: Tensor | None = None
    head: PackedLinear | None = None
    head_ids: Tensor | None = None

    @property
    def norms(self) -> Sequence[NormsOfLayer]:
        return self.packed.norms

    @property
    def changes(self) -> frozenset[str]:
        return self.packed.changes

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + sum(part.nbytes for part in (self.table, self.head) if part is not None)


def of_layers(batch: AdapterBatch | None) -> AdapterBatch | None:
    """Return a batch with the adapters as `Ops.pack_adapter` returned them."""
    if batch is None or not any(isinstance(adapter, AdapterWithEnds) for adapter in batch.adapters):
        return batch
    packed = [adapter.packed if isinstance(adapter, AdapterWithEnds) else adapter for adapter in batch.adapters]
    return replace(batch, adapters=packed)


def adapt_embeddings(ops: Ops, embeddings: Tensor, token_ids: Tensor, batch: AdapterBatch) -> None:
    """Change the embeddings [T, H] of tokens [T] in place."""
    for number, adapter in enumerate(batch.adapters):
        if not isinstance(adapter, AdapterWithEnds) or adapter.table is None:
            continue
        if not len(rows := rows_of(number, batch.tokens, embeddings.device)):
            continue
        ids = token_ids[rows].long()
        if adapter.table_ids is None:
            embeddings[rows] = ops.embed(ids, adapter.table)
            continue
        at = torch.searchsorted(adapter.table_ids, ids).clamp_(max=len(adapter.table_ids) - 1)
        has_own = (adapter.table_ids[at] == ids)[:, None]
        embeddings[rows] = torch.where(has_own, ops.embed(at, adapter.table), embeddings[rows])
    if any("embedding" in adapter.changes for adapter in batch.adapters):
        plain = of_layers(batch)
        assert plain is not None
        ops.adapt_embeddings(embeddings, token_ids, plain)


def logits_of(ops: Ops, hidden: Tensor, head: PackedLinear, batch: AdapterBatch | None) -> Tensor:
    """Return logits float32 [R, V] of hidden [R, H], the output of the last layer for the first R wanted tokens."""
    if batch is None:
        return ops.linear_logits(hidden, head)
    wanted, device = batch.wanted[: len(hidden)], hidden.device
    own = [
        (adapter, rows)
        for number, adapter in enumerate(batch.adapters)
        if isinstance(adapter, AdapterWithEnds)
        and adapter.head is not None
        and len(rows := rows_of(number, wanted, device))
    ]
    whole = [rows for adapter, rows in own if adapter.head_ids is None]
    if sum(map(len, whole)) < len(hidden):
        logits = ops.linear_logits(hidden, head)
    else:  # no row needs the head of the decoder
        logits = torch.empty((len(hidden), head.out_features), dtype=torch.float32, device=device)
    for adapter, rows in own:
        assert adapter.head is not None
        found = ops.linear_logits(hidden[rows], adapter.head)
        if adapter.head_ids is None:
            logits[rows] = found
        else:
            logits[rows[:, None], adapter.head_ids[None]] = found
    if any("head" in adapter.changes for adapter in batch.adapters):
        plain = of_layers(batch)
        assert plain is not None
        ops.adapt_logits(logits, hidden, plain)
    return logits
