"""All-reduce of small tensors through memory that all GPUs of a machine map: the symmetric memory of torch.

NCCL needs several steps over the ranks of a ring or tree, whose latency is most of the time of a small tensor. With one
shot, each rank reads the tensors of all ranks and adds them. With two shots, each rank adds a part of the numbers and
reads the other parts. The ranks use it if all of them find its sums right at start, and NCCL otherwise.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from quire.kernels import RecordGraph

log = logging.getLogger(__name__)

MODULE = "torch.distributed._symmetric_memory"
SIZES = (2, 4, 8)  # with other numbers of ranks, torch adds in another order on each rank
DTYPES = (torch.bfloat16, torch.float32)  # of torch's kernels
ONE_SHOT_BYTES = 256 << 10  # largest tensor of one shot, of which a rank reads all copies
MAX_BYTES = 4 << 20  # largest tensor of two shots, and the size of the buffer; NCCL is faster beyond
ALIGNMENT = 16  # bytes that a thread reads at once
REPEATS = 3  # of each case of the self-test, one right after the other: the buffer is overwritten


class ExchangeBuffer(Protocol):
    """A buffer of MAX_BYTES on this rank that all other ranks can read. All ranks call its methods together."""

    values: torch.Tensor  # uint8 [MAX_BYTES]

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum over all ranks of `part`, the beginning of the buffer, to `out` of the same shape."""

    def two_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Do the same with less memory traffic and one more exchange. `part` is overwritten."""


class SymmetricBuffer:
    """The buffer of torch, which all ranks of the default group allocate together."""

    def __init__(self, device: torch.device) -> None:
        """Map the memory of all ranks. Raises RuntimeError if the devices cannot."""
        module = importlib.import_module(MODULE)
        group = dist.group.WORLD
        assert group is not None
        self._group = group.group_name
        self.values: torch.Tensor = module.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        module.rendezvous(self.values, self._group)

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._group, out)

    def two_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_out(part, "sum", self._group, out)


class SymmetricAllReduce:
    """Sums over all ranks through an `ExchangeBuffer`. CUDA graphs may contain them."""

    def __init__(self, buffer: ExchangeBuffer) -> None:
        self._buffer = buffer

    @staticmethod
    def takes(values: torch.Tensor) -> bool:
        """Return whether `all_reduce` can sum these values. The answer is equal on all ranks.

        Type, shape and place in the storage determine the answer, and the code of the model determines these.
        """
        offset = values.storage_offset() * values.itemsize
        is_aligned = values.is_contiguous() and values.nbytes % ALIGNMENT == 0 and offset % ALIGNMENT == 0
        return values.dtype in DTYPES and is_aligned and 0 < values.nbytes <= MAX_BYTES

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by the sum over all ranks, added in their order, and return it."""
        flat = values.view(-1)
        part = self._buffer.values[: values.nbytes].view(values.dtype)
        part.copy_(flat)
        (self._buffer.one_shot if values.nbytes <= ONE_SHOT_BYTES else self._buffer.two_shot)(part, flat)
        return values


def symmetric_all_reduce(
    rank: int,
    size: int,
    device: torch.device,
    record: RecordGraph,
    make_buffer: Callable[[torch.device], ExchangeBuffer] = SymmetricBuffer,
) -> SymmetricAllReduce | None:
    """Return the all-reduce of this rank if all ranks have tested it; None on all ranks otherwise.

    All ranks call it together, after the process group was made. Rank 0 logs one line. Ranks agree on the result of
    each step, and a step ends at the same collective operation on all ranks even if it finds wrong sums. record:
    records a CUDA graph.
    """
    if size not in SIZES:
        return None
    test = SumTest(rank, size, device, make_buffer, record)
    for step in (test.check_peers, test.make_buffer, test.check_sums, test.record_graphs, test.check_graphs):
        fault = ""
        try:
            step()
        except Exception as error:  # torch keeps the module private, and its errors have no common class
            fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if not _all_agree(not fault, device):
            if rank == 0:
                log.warning("all-reduce by NCCL instead of symmetric memory: %s", fault or "another rank cannot use it")
            elif fault:
                log.info("rank %d cannot use symmetric memory: %s", rank, fault)
            return None
    if rank == 0:
        log.info("all-reduce of at most %d KiB by symmetric memory, of more by NCCL", MAX_BYTES >> 10)
    return test.all_reduce


def _all_agree(is_right: bool, device: torch.device) -> bool:
    """Return whether all ranks call this with True."""
    votes = torch.tensor([int(is_right)], dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


@dataclass
class RecordedSum:
    """A sum that is recorded as a CUDA graph: `values` are replaced before a replay, and `sums` are its result."""

    values: torch.Tensor
    sums: torch.Tensor
    replay: Callable[[], None]


class SumTest:
    """The steps of the test of one rank. Each raises RuntimeError if this rank finds a fault."""

    all_reduce: SymmetricAllReduce

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        make_buffer: Callable[[torch.device], ExchangeBuffer],
        record: RecordGraph,
    ) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._make_buffer, self._record = make_buffer, record
        self._recorded: list[RecordedSum] = []

    def check_peers(self) -> None:
        """Check that this GPU can read the memory of the GPUs of all other ranks, whose numbers are the ranks."""
        own = self._device.index
        others = [other for other in range(self._size) if other != own]
        missing = [str(other) for other in others if not torch.cuda.can_device_access_peer(own, other)]
        if missing:
            raise RuntimeError(f"GPU {own} has no peer access to {', '.join(missing)}")

    def make_buffer(self) -> None:
        """Allocate the buffer."""
        self.all_reduce = SymmetricAllReduce(self._make_buffer(self._device))

    def check_sums(self) -> None:
        """Check that sums of all types and lengths are right, and equal on all ranks."""
        faults: list[str] = []
        for dtype, length in _shapes():
            what = f"{length} values in {str(dtype)[6:]}"
            numbers = torch.arange(length, device=self._device)
            random = [_random(length, other, self._device).to(dtype) for other in range(self._size)]
            total, sizes = torch.stack(random).double().sum(0), torch.stack(random).double().abs().sum(0)
            for repeat in range(REPEATS):
                pattern = (numbers + repeat) % 5  # sums of integers up to 256 are exact in bfloat16
                if not torch.equal(self._sum(pattern.to(dtype)), self._expected(pattern, dtype)):
                    faults.append(f"sums of integers are wrong, {what}")
                factor = 2.0**repeat
                sums = self.all_reduce.all_reduce(random[self._rank] * factor)
                allowed = sizes * factor * self._size * torch.finfo(dtype).eps
                if not bool(((sums.double() - total * factor).abs() <= allowed).all()):
                    faults.append(f"sums of random numbers are wrong, {what}")
                parts = [torch.empty_like(sums) for _ in range(self._size)]
                dist.all_gather(parts, sums)
                if not all(torch.equal(part, sums) for part in parts):
                    faults.append(f"ranks have different sums, {what}")
        if faults:
            raise RuntimeError(faults[0])

    def record_graphs(self) -> None:
        """Record sums of all types and lengths as CUDA graphs."""
        for dtype, length in _shapes():
            values = torch.zeros(length, dtype=dtype, device=self._device)
            sums = torch.empty_like(values)

            def launch(values: torch.Tensor = values, sums: torch.Tensor = sums) -> None:
                self.all_reduce.all_reduce(sums.copy_(values))

            graph, _ = self._record(launch, None)
            self._recorded.append(RecordedSum(values, sums, graph.replay))

    def check_graphs(self) -> None:
        """Check that replayed sums are those of the values at the replay."""
        faults: list[str] = []
        for recorded in self._recorded:
            for factor in (1, 2):
                pattern = torch.arange(len(recorded.values), device=self._device) % 3 * factor
                recorded.values.copy_(pattern * (self._rank + 1))
                recorded.replay()
                if not torch.equal(recorded.sums, self._expected(pattern, recorded.sums.dtype)):
                    kind = str(recorded.sums.dtype)[6:]
                    faults.append(f"a CUDA graph gives wrong sums, {len(pattern)} values in {kind}")
        self._recorded.clear()
        if faults:
            raise RuntimeError(faults[0])

    def _sum(self, pattern: torch.Tensor) -> torch.Tensor:
        """Return the sum of a pattern times rank + 1."""
        return self.all_reduce.all_reduce(pattern * (self._rank + 1))

    def _expected(self, pattern: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum that is right."""
        return (pattern * (self._size * (self._size + 1) // 2)).to(dtype)


def _shapes() -> Iterator[tuple[torch.dtype, int]]:
    """Yield types and lengths: the shortest and the longest tensors of one shot, and of two."""
    for dtype in DTYPES:
        for size in (ALIGNMENT, ONE_SHOT_BYTES, ONE_SHOT_BYTES + ALIGNMENT, MAX_BYTES):
            yield dtype, size // dtype.itemsize


def _random(length: int, rank: int, device: torch.device) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator("cpu").manual_seed(rank), device="cpu").to(device)
