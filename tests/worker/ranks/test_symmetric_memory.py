"""Ranks use symmetric memory if all of them find its sums right, and NCCL otherwise.

Two processes sum with gloo in place of the kernels of torch, which need GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from quire.ops.paths import PROJECT_ROOT
from quire.worker.ranks import symmetric_memory
from quire.worker.ranks.symmetric_memory import MAX_BYTES, ONE_SHOT_BYTES, SymmetricAllReduce

MODES = ("right", "wrong", "two shots", "not equal", "no memory", "no access", "stale graph")
PROGRAM = """
import json, logging, sys, torch
import torch.distributed as dist
from quire.worker.interpreter import leave
from quire.worker.ranks import collectives, symmetric_memory

rank, modes = int(sys.argv[1]), json.loads(sys.argv[2])  # modes to the files by which the ranks meet
shots, lines, mode = [], [], ""
logging.getLogger("quire").addHandler(type("Kept", (logging.Handler,), {"emit": lambda _, r: lines.append(r)})())
logging.getLogger("quire").setLevel(logging.INFO)
device = torch.device("cpu", 0)


class Buffer:
    def __init__(self, device):
        if mode == "no memory" and rank == 1:
            raise RuntimeError("cuMemCreate failed")
        self.values = torch.empty(symmetric_memory.MAX_BYTES, dtype=torch.uint8)

    def one_shot(self, part, out):
        shots.append(1)
        total = part.clone()
        dist.all_reduce(total)
        if mode == "wrong" and rank == 1:
            total[-1] += 1
        if mode == "not equal" and rank == 1 and total.dtype is torch.bfloat16:
            total = torch.where(total % 1 == 0, total, total * (1 + 2**-8))
        out.copy_(total)

    def two_shot(self, part, out):
        self.one_shot(part, out)
        shots[-1] = 2
        if mode == "two shots":
            out[0] = 0.5


class Graph:
    def __init__(self, launch):
        launch()
        self.replay = (lambda: None) if mode == "stale graph" else launch


def has_access(device, other):
    return mode != "no access" or device == 0


def check_peers(test, real=symmetric_memory.SumTest.check_peers):
    test._device = torch.device("cuda", rank)
    real(test)
    test._device = device


torch.cuda.can_device_access_peer = has_access
symmetric_memory.SumTest.check_peers = check_peers
found = {}
for mode, file in modes.items():
    lines.clear()
    ranks = collectives.DistributedCollectives(rank, 2, file, device, keeps_order=False)
    chosen = symmetric_memory.symmetric_all_reduce(rank, 2, device, lambda launch, pool: (Graph(launch), pool), Buffer)
    ranks._symmetric = chosen
    shots.clear()
    sums = [ranks.all_reduce(torch.full((n,), rank + 1.5)).sum().item() / n for n in (8, 7, 70000, 2**21)]
    said = [[line.levelname, line.getMessage()] for line in lines]
    found[mode] = {"is_used": chosen is not None, "sums": sums, "shots": list(shots), "log": said}
    ranks.close()
print(json.dumps(found))
leave(0)
"""


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """What each of two processes found in each mode."""
    files = {mode: os.memfd_create("test") for mode in MODES}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), json.dumps(files)],
            pass_fds=files.values(),
            stdout=subprocess.PIPE,
            cwd=PROJECT_ROOT,
        )
        for rank in range(2)
    ]
    for file in files.values():
        os.close(file)
    try:
        return [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_small_tensors_are_summed_by_symmetric_memory_if_its_sums_are_right(runs: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(run["right"] for run in runs):
        assert found["is_used"]
        assert found["sums"] == [4.0] * 4
        assert found["shots"] == [1, 2]  # 7 numbers are not aligned, and 8 MiB are too many
        said = [["INFO", "all-reduce of at most 4096 KiB by symmetric memory, of more by NCCL"]]
        assert found["log"] == ([] if rank else said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cause", "of_rank_1"),
    [
        ("wrong", "RuntimeError: ranks have different sums, 8", "RuntimeError: sums of integers are wrong, 8 values"),
        (
            "two shots",
            "RuntimeError: sums of integers are wrong, 131080 values in bfloat16",
            "131080 values in bfloat16",
        ),
        ("not equal", "RuntimeError: ranks have different sums, 8 values in bfloat16", "sums, 8 values in bfloat16"),
        ("no memory", "another rank cannot use it", "RuntimeError: cuMemCreate failed"),
        ("no access", "another rank cannot use it", "RuntimeError: GPU 1 has no peer access to 0"),
        (
            "stale graph",
            "RuntimeError: a CUDA graph gives wrong sums, 8 values in bfloat16",
            "a CUDA graph gives wrong",
        ),
    ],
)
def test_a_fault_of_one_rank_makes_all_ranks_use_nccl_with_one_line(
    mode: str, cause: str, of_rank_1: str, runs: list[dict[str, Any]]
) -> None:
    first, second = (run[mode] for run in runs)
    for found in (first, second):
        assert not found["is_used"]
        assert found["sums"] == [4.0] * 4
        assert found["shots"] == []
    [[level, line]] = first["log"]
    assert level == "WARNING"
    assert line.startswith(f"all-reduce by NCCL instead of symmetric memory: {cause}")
    [[level, line]] = second["log"]
    assert level == "INFO"
    assert of_rank_1 in line


def test_numbers_of_ranks_that_torch_adds_in_another_order_are_left_to_nccl() -> None:
    def fail(*_: object) -> Any:
        raise AssertionError("nothing is allocated")

    for size in (3, 5, 6, 16):
        assert symmetric_memory.symmetric_all_reduce(0, size, torch.device("cpu"), fail, fail) is None


def test_only_aligned_tensors_of_the_right_types_and_sizes_are_taken() -> None:
    takes = SymmetricAllReduce.takes
    rows = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert takes(rows)
    assert takes(rows[3:])
    assert takes(torch.zeros(MAX_BYTES // 4))
    for other in (
        rows.half(),
        rows[:, :8],
        rows.view(-1)[1:9],
        rows.view(-1)[:12],
        rows[:0],
        torch.zeros(MAX_BYTES // 4 + 4),
    ):
        assert not takes(other)
    assert ONE_SHOT_BYTES < MAX_BYTES


def test_the_operations_of_torch_exist_with_these_arguments() -> None:
    """The module is private, so that another version of torch may change it."""
    import torch.distributed._symmetric_memory as module

    assert callable(module.empty)
    assert callable(module.rendezvous)
    for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_out"):
        arguments = [one.name for one in getattr(torch.ops.symm_mem, name).default._schema.arguments]
        assert arguments[:3] == ["input", "reduce_op", "group_name"]
        assert len(arguments) == 4
