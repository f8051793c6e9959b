"""The number of ranks that share a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.shared.process.errors import StartError
from quire.worker.device.topology import Core, Topology
from quire.worker.models.choice import choose_model
from quire.worker.models.native.config import read_config
from quire.worker.ranks import number
from quire.worker.ranks.number import check_ranks, choose_ranks
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.transformers_checkpoints import make_kind


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
