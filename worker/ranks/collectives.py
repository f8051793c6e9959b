"""Collective operations of the ranks: broadcast of batches, all-reduce of products, gather of logits at rank 0.

On CPUs ranks exchange data in shared memory, and the C++ kernels take the sums (kernels/cpu/ranks.h). Otherwise
torch.distributed does it: with NCCL between GPUs, and with gloo for plain torch on a CPU. Small tensors of GPUs are
summed through symmetric memory where it is right (`symmetric_memory`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.distributed as dist

from quire import kernels
from quire.kernels.cpu.ranks import CpuRanks, shared_file
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.ranks.symmetric_memory import symmetric_all_reduce

# Alignment of the parts of a broadcast batch, in numbers of 4 bytes: kernels want addresses aligned to 16 bytes.
ALIGNMENT = 4
# All ranks are on this machine, so they find each other on its loopback interface.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# Size of a number that a follower answers.
ANSWER_BYTES = 8


def padded(length: int) -> int:
    """Round up to ALIGNMENT."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class BatchSizes(NamedTuple):
    """The sizes of a ForwardBatch."""

    tokens: int
    sequences: int
    columns: int  # of the block tables
    rows: int
    pooled_rows: int
    state_slots: int
    snapshots: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> BatchSizes:
        sequences, columns = batch.block_tables.shape
        optional = batch.pooled_rows, batch.state_slots, batch.snapshots
        counts = [0 if part is None else len(part) for part in optional]
        return cls(len(batch.token_ids), sequences, columns, len(batch.logits_rows), *counts)

    def lengths(self) -> list[int]:
        """Return the lengths of the parts of a ForwardBatch, in its order, and in its slots and snapshots of states."""
        tokens, sequences, columns, rows, *optional, snapshots = self
        return [tokens, tokens, tokens, sequences * columns, sequences, sequences + 1, rows, *optional, 3 * snapshots]

    def spans(self) -> list[slice]:
        """Return the place of each part in the array that is broadcast."""
        spans, at = [], 0
        for length in self.lengths():
            spans.append(slice(at, at + length))
            at += padded(length)
        return spans

    @property
    def total(self) -> int:
        return sum(map(padded, self.lengths()))


class Collectives(ABC):
    """One rank's side of the collective operations: a `TensorParallelGroup` of the decoder.

    All ranks call the same operations in the same order, with tensors of the same shapes.
    """

    rank: int
    size: int
    device = torch.device("cpu")

    @abstractmethod
    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by the sum over all ranks, and return it."""

    @abstractmethod
    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by those of rank 0, and return it."""

    @abstractmethod
    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        """Gather values [...] of each rank -> [ranks, ...] on rank 0, None on all other ranks."""

    @abstractmethod
    def give_up(self) -> None:
        """Release ranks that wait for one that has ended, if that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Release resources after the last collective call."""

    def all_gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """Gather columns [R, C] of each rank -> [R, width] side by side on rank 0; unspecified on all other ranks."""
        parts = self.gather(columns)
        return columns if parts is None else torch.cat(parts.unbind(), dim=1)[:, :width].contiguous()

    def send(self, batch: ForwardBatch) -> None:
        """Broadcast a batch. Called by rank 0; the followers know its sizes."""
        states = [part.to(self.device) for part in (batch.state_slots, batch.snapshots) if part is not None]
        parts = [part.reshape(-1).int() for part in (*batch.parts(), *states)]
        pads = torch.zeros(ALIGNMENT, dtype=torch.int32, device=self.device)
        self.broadcast(torch.cat([piece for part in parts for piece in (part, pads[: -len(part) % ALIGNMENT])]))

    def receive(self, sizes: BatchSizes) -> ForwardBatch:
        """Receive a batch that rank 0 sends."""
        values = self.broadcast(torch.empty(sizes.total, dtype=torch.int32, device=self.device))
        tokens, positions, slots, tables, lengths, starts, rows, pooled, state_slots, snapshots = (
            values[span] for span in sizes.spans()
        )
        return ForwardBatch(
            tokens,
            positions,
            slots,
            tables.view(sizes.sequences, sizes.columns),
            lengths,
            starts,
            rows.long(),
            pooled.long() if sizes.pooled_rows else None,
            state_slots.long() if sizes.state_slots else None,
            snapshots.view(-1, 3).long() if sizes.snapshots else None,
        )


class SharedMemoryCollectives(CpuRanks, Collectives):
    """Shared memory, between processes that compute with the C++ kernels."""

    def close(self) -> None:
        """Do nothing: the kernel frees the memory with its last process."""


class DistributedCollectives(Collectives):
    """torch.distributed, between GPUs or between processes that compute with plain torch on a CPU."""

    def __init__(
        self,
        rank: int,
        size: int,
        file: int,
        device: torch.device,
        keeps_order: bool,
        record: kernels.RecordGraph | None = None,
    ) -> None:
        """Wait for all ranks.

        file: descriptor of a file that all ranks have open, empty at first. The descriptor must stay open: torch opens
        the file again by that number for each use, and would otherwise write to another file with the number.
        keeps_order: a sum must not depend on the number of rows that are reduced together. With more than two summands
        the libraries choose their order by the place and the number of values.
        record: as of `meet`.
        """
        self.rank, self.size, self.device = rank, size, device
        self._keeps_order = keeps_order and size > 2
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.FileStore(f"/proc/self/fd/{file}", size),  # type: ignore[attr-defined] # missing in its __all__
            rank=rank,
            world_size=size,
            device_id=device if is_cuda else None,
        )
        self._symmetric = None
        if is_cuda and record and not keeps_order:
            self._symmetric = symmetric_all_reduce(rank, size, device, record)

    @property
    def has_symmetric_memory(self) -> bool:
        """True if small tensors are summed through symmetric memory."""
        return self._symmetric is not None

    def give_up(self) -> None:
        """Do nothing: gloo notices by itself, and waiting for NCCL ends with the process."""

    def close(self) -> None:
        if self.device.type != "cuda":  # NCCL would wait for all graphs to be freed; the process ends anyway
            dist.destroy_process_group()

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        if self._symmetric is not None and self._symmetric.takes(values):
            return self._symmetric.all_reduce(values)
        if not self._keeps_order:
            dist.all_reduce(values)
            return values
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return values.copy_(total)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        dist.broadcast(values, 0)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        if self.rank:
            dist.gather(values)
            return None
        parts = values.new_empty((self.size, *values.shape))
        dist.gather(values, list(parts.unbind()))
        return parts


def meeting(size: int, ops: kernels.Ops) -> int:
    """Make a file by which `size` ranks find each other in `meet`; returns its descriptor."""
    return shared_file(size) if isinstance(ops, kernels.CpuOps) else os.memfd_create("quire-ranks")


def meet(rank: int, size: int, file: int, ops: kernels.Ops, record: kernels.RecordGraph | None = None) -> Collectives:
    """Join the ranks that share a `meeting`. Takes over the descriptor of its file.

    record: records a CUDA graph, with which GPUs test whether they can sum through symmetric memory; None lets them sum
    without it.
    """
    if not isinstance(ops, kernels.CpuOps):
        return DistributedCollectives(rank, size, file, ops.device, ops.row_invariant, record)
    try:
        return SharedMemoryCollectives(rank, size, file)
    finally:
        os.close(file)
