"""The weighted mean of checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from models.demo.training.average import OTHERS, WEIGHTS, average
from safetensors.torch import load_file, save_file


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
