"""What ranks exchange while they compute: batches from rank 0, sums of products, and logits back to rank 0.

On CPUs it is memory that all of them map, and sums are a part of the kernels (kernels/cpu/ranks.h). Elsewhere it is
torch.distributed: NCCL between GPUs, and gloo for plain torch on a CPU.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.distributed as dist

from quire import kernels
from quire.kernels.cpu.ranks import CpuRanks, shared_file
from quire.worker.models.batch import ForwardBatch

# The parts of a batch that is sent begin at multiples of so many numbers: kernels want addresses aligned to 16 bytes.
ALIGNMENT = 4
# All ranks are on this machine: what they say to find each other stays on it.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# Numbers that are said to rank 0.
ANSWER_BYTES = 8
# Exit code of a rank that has said what is wrong.
GAVE_UP = 1


def padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class BatchSizes(NamedTuple):
    """Of a batch."""

    tokens: int
    sequences: int
    columns: int  # of the block tables
    rows: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> BatchSizes:
        return cls(len(batch.token_ids), *batch.block_tables.shape, len(batch.logits_rows))

    def lengths(self) -> list[int]:
        """Of the parts of a ForwardBatch, in its order."""
        tokens, sequences, columns, rows = self
        return [tokens, tokens, tokens, sequences * columns, sequences, sequences + 1, rows]

    def spans(self) -> list[slice]:
        """Where they lie when all are sent as one."""
        spans, at = [], 0
        for length in self.lengths():
            spans.append(slice(at, at + length))
            at += padded(length)
        return spans

    @property
    def total(self) -> int:
        return sum(map(padded, self.lengths()))


class Collectives(ABC):
    """One rank's side of what all ranks do together. All of them call the same in the same order, with tensors of the
    same shapes. Implements `quire.worker.models.decoder.TensorParallelGroup`."""

    rank: int
    size: int
    device = torch.device("cpu")

    @abstractmethod
    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """In place, the sum over all ranks."""

    @abstractmethod
    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """In place, what rank 0 has."""

    @abstractmethod
    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        """[...] of each rank -> [ranks, ...] on rank 0, None elsewhere."""

    @abstractmethod
    def give_up(self) -> None:
        """Let nobody wait for a rank that has ended, where that can be done."""

    @abstractmethod
    def close(self) -> None:
        """Behind the last call of all."""

    def all_gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """columns [R, C] of each rank -> [R, width] on rank 0, side by side; elsewhere anything."""
        parts = self.gather(columns)
        return columns if parts is None else torch.cat(parts.unbind(), dim=1)[:, :width].contiguous()

    def send(self, batch: ForwardBatch) -> None:
        """Give all other ranks a batch, as rank 0. They know its sizes."""
        parts = [part.reshape(-1).int() for part in batch.parts()]
        pads = torch.zeros(ALIGNMENT, dtype=torch.int32, device=self.device)
        self.broadcast(torch.cat([one for part in parts for one in (part, pads[: -len(part) % ALIGNMENT])]))

    def receive(self, sizes: BatchSizes) -> ForwardBatch:
        values = self.broadcast(torch.empty(sizes.total, dtype=torch.int32, device=self.device))
        *parts, rows = (values[span] for span in sizes.spans())
        parts[3] = parts[3].view(sizes.sequences, sizes.columns)
        return ForwardBatch(*parts, rows.long())


class SharedMemoryCollectives(CpuRanks, Collectives):
    """Between processes that compute with the C++ kernels."""

    def close(self) -> None:
        """The memory goes with its last process."""


class DistributedCollectives(Collectives):
    """Between GPUs, or processes that compute with plain torch on a CPU."""

    def __init__(self, rank: int, size: int, file: int, device: torch.device, keeps_order: bool) -> None:
        """Waits for all ranks. file: descriptor of a file that all have open, empty at first. It stays open: torch
        opens it again by its number, at each use and at the end, and would write to whatever has that number then.

        keeps_order: sums must not depend on how many rows are added up at once. Two summands have one order only; of
        more the libraries choose it by the place and the number of values.
        """
        self.rank, self.size, self.device = rank, size, device
        self._keeps_order = keeps_order and size > 2
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.FileStore(f"/proc/self/fd/{file}", size),
            rank=rank,
            world_size=size,
            device_id=device if is_cuda else None,
        )

    def give_up(self) -> None:
        """gloo finds out by itself, and what waits for NCCL ends with the process."""

    def close(self) -> None:
        if self.device.type != "cuda":  # there it waits for all graphs to be gone; the process ends anyway
            dist.destroy_process_group()

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
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
    """Descriptor of a file by which so many ranks find each other, for `meet`."""
    return shared_file(size) if isinstance(ops, kernels.CpuOps) else os.memfd_create("quire-ranks")


def meet(rank: int, size: int, file: int, ops: kernels.Ops) -> Collectives:
    """One of the ranks that share a `meeting`, whose file is theirs from now on."""
    if not isinstance(ops, kernels.CpuOps):
        return DistributedCollectives(rank, size, file, ops.device, ops.row_invariant)
    try:
        return SharedMemoryCollectives(rank, size, file)
    finally:
        os.close(file)
