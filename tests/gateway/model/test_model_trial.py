"""The trial of model files in a process with limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.gateway.model import model_trial
from tests.support.gateway.running import write_model


def test_good_files_have_no_fault(tmp_path: Path) -> None:
    assert model_trial.try_out(write_model(tmp_path / "m")) == ""


def test_a_fault_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("[" * 100_000)
    assert "not a tokenizer" in model_trial.try_out(folder) or "fails" in model_trial.try_out(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in model_trial.try_out(folder)


def test_a_trial_that_takes_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_trial, "TIMEOUT_S", 0.01)
    assert "more than 0.01 s" in model_trial.try_out(write_model(tmp_path / "m"))
