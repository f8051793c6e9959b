"""The libraries of others that the pages load: what is in the tree was fetched, and what is fetched is pinned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.ops.tools import vendored


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "vendor"
    shutil.copytree(vendored.FOLDER, folder)
    monkeypatch.setattr(vendored, "FOLDER", folder)
    return folder


def test_the_files_are_those_of_the_table() -> None:
    assert vendored.mistakes() == []


def test_every_change_is_found(copy: Path) -> None:
    changed = next(copy.glob("temml-*/temml.min.mjs"))
    changed.write_text(changed.read_text() + " ")
    lost = next(copy.glob("highlight.js-*/LICENSE.txt"))
    lost.unlink()
    added = changed.with_name("more.mjs")
    added.write_text("")
    assert vendored.mistakes() == [
        f"{added.relative_to(copy)} is not in the table",
        f"{lost.relative_to(copy)} is missing",
        f"{added.relative_to(copy)} is of no pinned package",
        f"{changed.relative_to(copy)} was changed",
    ]


def test_a_download_that_fails_leaves_the_files(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(package: vendored.Package, scratch: Path) -> dict[str, bytes]:
        raise OSError(package.name)

    monkeypatch.setattr(vendored, "_unpacked", refuse)
    with pytest.raises(OSError, match="markdown-it"):
        vendored.fetch()
    assert vendored.mistakes() == []


def test_what_is_fetched_takes_the_place_of_what_was_there(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(package: vendored.Package, scratch: Path) -> dict[str, bytes]:
        return {"LICENSE": b"", **dict.fromkeys(package.files, b"x")}

    monkeypatch.setattr(vendored, "_unpacked", unpacked)
    (copy / "old.mjs").write_text("")
    vendored.fetch()
    assert vendored.mistakes() == []
    assert not (copy / "old.mjs").exists()


def test_only_what_the_page_may_not_load_is_left_out() -> None:
    style = '@font-face {\n  src: url("x");\n}\nmath {}\n  mask-image: url("data:x");\n.a {}\n'
    assert vendored.adapted("temml.css", style.encode()) == b"math {}\n.a {}\n"
    assert vendored.adapted("temml.min.mjs", b"var temml=1;") == b"var temml=1;\nexport default temml;\n"
    assert vendored.adapted("index.mjs", b"x") == b"x"
    assert "url(" not in next(vendored.FOLDER.glob("temml-*/temml.css")).read_text()


def test_every_package_is_pinned_to_its_bytes() -> None:
    packages = [*vendored.PACKAGES, *(inner for package in vendored.PACKAGES for inner in package.bundled)]
    assert all(package.integrity.startswith("sha512-") for package in packages)
