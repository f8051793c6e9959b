"""The libraries of others in the pages: npm's packages give the files that are in the tree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.ops.tools import vendored

pytestmark = pytest.mark.soak


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_fetching_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = files_of(vendored.FOLDER)
    monkeypatch.setattr(vendored, "FOLDER", tmp_path / "vendor")
    vendored.fetch()
    assert files_of(tmp_path / "vendor") == wanted


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
