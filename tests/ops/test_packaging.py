"""One import name: what is installed is `quire`, and nothing in the project imports a folder by its own name."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT

FOLDERS = "gateway|worker|shared|kernels|ops"
OLD_IMPORT = re.compile(rf"^\s*(from|import) ({FOLDERS})\b", re.MULTILINE)
SOURCES = [path for folder in (*FOLDERS.split("|"), "tests", "src") for path in (PROJECT_ROOT / folder).rglob("*.py")]


def test_the_installed_package_is_quire_alone() -> None:
    """`kernels` and `ops` are packages of other projects; transformers looks for the first."""
    top_level = importlib.metadata.distribution("quire").read_text("top_level.txt")
    assert top_level is not None
    assert top_level.split() == ["quire"]


@pytest.mark.parametrize("line", ["import worker.service  # noqa", "    from kernels import ops", "import shared"])
def test_an_old_import_is_recognised(line: str) -> None:
    assert OLD_IMPORT.search(line)


def test_no_module_imports_a_folder_by_its_own_name() -> None:
    assert len(SOURCES) > 400
    found = [f"{path}: {match[0].strip()}" for path in SOURCES if (match := OLD_IMPORT.search(path.read_text()))]
    assert found == []


def test_the_links_of_the_package_lead_to_the_folders() -> None:
    links = {path.name: path.resolve() for path in (PROJECT_ROOT / "src" / "quire").iterdir() if path.is_symlink()}
    assert links == {name: Path(PROJECT_ROOT, name).resolve() for name in FOLDERS.split("|")}
