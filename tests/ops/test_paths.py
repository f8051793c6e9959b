"""The project's folder, and the state folders of a server and of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops import paths


def test_the_project_and_the_import_root_are_those_of_the_checkout() -> None:
    assert (paths.PROJECT_ROOT / "pyproject.toml").is_file()
    assert (paths.IMPORT_ROOT / "quire" / "ops" / "paths.py").is_file()


def test_a_checkout_keeps_its_state_and_an_installed_package_that_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert paths.default_state_dir(environ) == paths.PROJECT_ROOT / ".quire"
    monkeypatch.setattr(paths, "PROJECT_ROOT", tmp_path)
    assert paths.default_state_dir(environ) == tmp_path / "quire"
    assert paths.default_state_dir({}) == Path.home() / ".local" / "state" / "quire"


def test_a_given_state_folder_is_absolute() -> None:
    assert paths.resolve_state_dir("~/state", {}) == Path.home() / "state"
    assert paths.resolve_state_dir("state", {}) == Path.cwd() / "state"
