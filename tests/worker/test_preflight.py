"""Settings that contradict each other are refused before a model is loaded, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.shared.errors import StartError
from quire.worker.preflight import check_settings
from quire.worker.settings import WorkerSettings

CPU = torch.device("cpu")


def test_swapping_without_memory_for_it() -> None:
    with pytest.raises(StartError, match="--preemption swap needs host memory, and --swap-gb is 0: raise it, or"):
        check_settings(WorkerSettings(preemption="swap", swap_gb=0), CPU)
    check_settings(WorkerSettings(preemption="auto", swap_gb=0), CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beat_s": 1.6}, "--beat-s 1.6 is more than half of --lease-s 3"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "--max-num-batched-tokens 8 is below --max-num-seqs 9"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        check_settings(WorkerSettings(**settings), CPU)


def test_the_defaults_pass() -> None:
    check_settings(WorkerSettings(), CPU)
    check_settings(WorkerSettings(max_num_seqs=4096), CPU)
