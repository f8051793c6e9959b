"""Collective operations give every rank the same sums, and rank 0 the parts of all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.process.errors import StartError
from quire.worker.device.topology import Core, Topology
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.choice import choose_model
from quire.worker.models.native.config import read_config
from quire.worker.ranks import number
from quire.worker.ranks.collectives import BatchSizes, Collectives, meet, meeting
from quire.worker.ranks.number import check_ranks, choose_ranks
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.transformers_checkpoints import make_kind

IN_ORDER = """
import itertools, json, sys, torch
from quire.worker.interpreter import leave
from quire.worker.ranks.collectives import DistributedCollectives

rank, file = map(int, sys.argv[1:])
ranks = DistributedCollectives(rank, 3, file, torch.device("cpu"), keeps_order=True)
orders = torch.tensor(list(itertools.permutations((2.0**30, 1.0, -(2.0**30)))))
sums = ranks.all_reduce(orders[:, rank].contiguous())
rounded = ranks.all_reduce(torch.tensor([256.0 if rank == 0 else 1.0]).bfloat16())
said = ranks.broadcast(torch.tensor([rank + 5]))
parts = ranks.gather(torch.tensor([rank, 7]))
print(json.dumps([sums.tolist(), rounded.tolist(), said.tolist(), parts if parts is None else parts.tolist()]))
ranks.close()
leave(0)
"""


@pytest.mark.slow
def test_sums_of_more_than_two_gpus_are_taken_in_order_where_rows_must_not_differ() -> None:
    """The test uses gloo in place of NCCL."""
    file, project = os.memfd_create("test"), Path(__file__).parents[3]
    command = [sys.executable, "-c", IN_ORDER]
    processes = [
        subprocess.Popen([*command, str(rank), str(file)], pass_fds=[file], stdout=subprocess.PIPE, cwd=project)
        for rank in range(3)
    ]
    os.close(file)
    try:
        found = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # A sum loses the 1.0 when it adds 1.0 to a large value, unless the large values have cancelled before.
    sums = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    for rank, answer in enumerate(found):
        assert answer == [sums, [258.0], [5], None if rank else [[0, 7], [1, 7], [2, 7]]]


class Echo(Collectives):
    """Rank 0, and a rank that receives the messages of rank 0."""

    said: torch.Tensor | None = None

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        if self.said is None:
            self.said = values.clone()
        return values.copy_(self.said)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        return values[None]

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_batch_arrives_as_it_was_sent_and_its_parts_begin_where_kernels_want_them() -> None:
    lengths = 5, 5, 5, (3, 2), 3, 4, 1  # most of these sizes are not multiples of 16 bytes
    *parts, rows = (torch.randint(1, 2**31 - 1, shape if isinstance(shape, tuple) else (shape,)) for shape in lengths)
    slots, snapshots = torch.tensor([4, 0, 7]), torch.tensor([[0, 2, 9], [2, 1, 11]])
    for optional, counts in (
        ((), (0, 0, 0)),
        ((torch.tensor([3, 4]),), (2, 0, 0)),
        ((None, slots), (0, 3, 0)),
        ((torch.tensor([3, 4]), slots, snapshots), (2, 3, 2)),
    ):
        sent = ForwardBatch(*(part.int() for part in parts), rows, *optional)
        echo = Echo()
        echo.send(sent)
        assert BatchSizes.of(sent) == (5, 3, 2, 1, *counts)
        received = echo.receive(BatchSizes.of(sent))
        states = [(one.state_slots, one.snapshots) for one in (received, sent)]
        for part, expected in zip(*states, strict=True):
            assert (part is None and expected is None) or torch.equal(part, expected)
        for part, expected in zip(received.parts(), sent.parts(), strict=True):
            assert part.dtype == expected.dtype
            assert torch.equal(part, expected)
            assert part.data_ptr() % 16 == 0


def test_the_file_by_which_ranks_meet_is_closed() -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    if not isinstance(ops, kernels.CpuOps):
        pytest.skip("needs the C++ kernels")
    file = meeting(1, ops)
    meet(0, 1, file, ops)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


# --- number -----------------------------------------------------------------------------------------------------------
# The number of ranks that share a model.


def test_a_cpu_worker_has_a_rank_per_node_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topology = Topology(tuple(Core((cpu,), cpu // 4) for cpu in range(8)), 8)
    monkeypatch.setattr(number, "read_topology", lambda: topology)
    config = read_config(make_checkpoint(tmp_path, "llama"))
    cpu = torch.device("cpu")

    def ranks(device: torch.device = cpu, **given: Any) -> int:
        return choose_ranks(WorkerSettings(**given), device, config).tensor_parallel_size

    assert ranks() == 2
    assert ranks(tensor_parallel_size=1) == 1
    assert ranks(threads=4) == 1
    assert ranks(thread_binding="none") == 1
    assert ranks(torch.device("cuda")) == 1


def test_ranks_must_divide_the_heads(tmp_path: Path) -> None:
    config = choose_model(make_kind(tmp_path / "gpt2", "gpt2"))
    device = torch.device("cpu")
    check_ranks(WorkerSettings(), device, config)
    check_ranks(WorkerSettings(tensor_parallel_size=2), device, config)
    with pytest.raises(StartError, match=r"--tensor-parallel-size 3: 3 ranks cannot share 4 heads; 1, 2, 4 can"):
        check_ranks(WorkerSettings(tensor_parallel_size=3), device, config)
