"""Training: the loss falls, and weights are averaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models.demo.training.average import OTHERS, WEIGHTS, average
from models.demo.training.train import WARMUP_STEPS, rate_at
from safetensors.torch import load_file, save_file


def test_the_rate_warms_up_and_falls_to_a_hundredth() -> None:
    assert rate_at(0, 0.0, 1.0) == pytest.approx(1 / WARMUP_STEPS)
    assert rate_at(WARMUP_STEPS, 0.0, 2.0) == pytest.approx(2.0)
    assert rate_at(1000, 0.5, 1.0) == pytest.approx(0.505)
    assert rate_at(1000, 1.0, 1.0) == pytest.approx(0.01)
    rates = [rate_at(1000, done / 100, 1.0) for done in range(101)]
    assert rates == sorted(rates, reverse=True)


def checkpoint(folder: Path, value: float, seed: int) -> Path:
    folder.mkdir()
    save_file({"w": torch.full((2, 3), value, dtype=torch.bfloat16)}, folder / WEIGHTS)
    for name in OTHERS:
        (folder / name).write_text(json.dumps({"runs": [{"seed": seed}]}))
    return folder


def test_weights_are_the_weighted_mean_and_the_runs_are_named(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a", 1.0, 1), checkpoint(tmp_path / "b", 2.0, 2)
    average({first: 0.75, second: 0.25}, tmp_path / "out")
    found = load_file(tmp_path / "out" / WEIGHTS)["w"]
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.float(), torch.full((2, 3), 1.25))
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [(one["share"], one["runs"][0]["seed"]) for one in log["average"]] == [(0.75, 1), (0.25, 2)]
    assert log["runs"] == [{"seed": 1}]


def test_shares_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add up to"):
        average({checkpoint(tmp_path / "a", 1.0, 1): 0.5}, tmp_path / "out")
