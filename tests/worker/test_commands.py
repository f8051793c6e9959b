"""The command of the worker: the model's folder becomes absolute before the worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.command_line import CommandError
from quire.worker import commands
from quire.worker.settings import WorkerSettings


def test_the_worker_gets_the_absolute_folder_of_the_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[WorkerSettings] = []
    monkeypatch.setattr("quire.worker.main.run", lambda settings: seen.append(settings) or 0)
    monkeypatch.chdir(tiny_model.parent)
    assert commands.run_worker(WorkerSettings(model=f"./{tiny_model.name}"), {}) == 0
    assert [Path(settings.model) for settings in seen] == [tiny_model.resolve()]


def test_a_folder_without_a_model_is_refused_before_the_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json is missing"):
        commands.run_worker(WorkerSettings(model=str(tmp_path)), {})
