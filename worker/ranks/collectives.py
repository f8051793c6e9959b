"""What ranks exchange while they compute."""

from __future__ import annotations

import logging
import os
import sys
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from worker.models.batch import ForwardBatch

# The parts of a batch that is sent begin at multiples of so many numbers: kernels want addresses aligned to 16 bytes.
ALIGNMENT = 4
# All ranks are on this machine: what they say to find each other stays on it.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


# Numbers that are said to rank 0.
ANSWER_BYTES = 8
# Exit code of a rank that has said what is wrong.
GAVE_UP = 1


def leave(code: int) -> NoReturn:
    """End the process of a rank. torch.distributed may abort or hang where the interpreter takes it down."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class Sizes(NamedTuple):
    """Of a batch."""

    tokens: int
    sequences: int
    columns: int  # of the block tables
    rows: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> Sizes:
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


class Collectives:
    """One rank's side of all collective operations; tensors are on `device`, and every rank calls the same in the same
    order. Implements `worker.models.decoder.Ranks`.

    keeps_order: sums do not depend on how many rows are added up at once. Two summands have one order only; of more the
    libraries choose it by the place and the number of values.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting: int, keeps_order: bool) -> None:
        """Waits for all ranks. meeting: descriptor of a file that all have open, empty at first."""
        self.rank, self.size, self.device = rank, size, device
        self._keeps_order = keeps_order and size > 2
        self._padding = torch.zeros(ALIGNMENT, dtype=torch.int32, device=device)
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.FileStore(f"/proc/self/fd/{meeting}", size),
            rank=rank,
            world_size=size,
            device_id=device if is_cuda else None,
        )

    def close(self) -> None:
        if self.device.type != "cuda":  # there it waits for all graphs to be gone; the process ends anyway
            dist.destroy_process_group()

    # --- of a model ---------------------------------------------------------------------------------------------------

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        if not self._keeps_order:
            dist.all_reduce(values)
            return values
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return values.copy_(total)

    def gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        if self.rank:
            dist.gather(columns)
            return columns
        parts = [torch.empty_like(columns) for _ in range(self.size)]
        dist.gather(columns, parts)
        return torch.cat(parts, dim=1)[:, :width].contiguous()

    # --- of a batch ---------------------------------------------------------------------------------------------------

    def send(self, batch: ForwardBatch) -> None:
        """Give all followers a batch, as rank 0. They know its sizes."""
        parts = [part.reshape(-1).int() for part in batch.parts()]
        dist.broadcast(torch.cat([one for part in parts for one in (part, self._padding[: -len(part) % ALIGNMENT])]), 0)

    def receive(self, sizes: Sizes) -> ForwardBatch:
        values = torch.empty(sizes.total, dtype=torch.int32, device=self.device)
        dist.broadcast(values, 0)
        *parts, rows = (values[span] for span in sizes.spans())
        parts[3] = parts[3].view(sizes.sequences, sizes.columns)
        return ForwardBatch(*parts, rows.long())
