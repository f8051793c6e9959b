"""docs/tour.md leads through code that exists: ten files, and parts of them that together can be read in one go."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from quire.ops.paths import PROJECT_ROOT

ANCHOR = re.compile(r"^`([\w/]+\.(?:py|lua))(?:::([\w.]+))?`$", re.MULTILINE)
ANCHORS = ANCHOR.findall((PROJECT_ROOT / "docs" / "tour.md").read_text())
FILES = 10
LINES = 1200


def lines_of(path: Path, name: str) -> int:
    """Return the number of lines of a function or class, `Class.method` among them, or of a whole file without a name.

    Raises KeyError if the file has no such name.
    """
    if not name:
        return path.read_text().count("\n")
    node: ast.AST = ast.parse(path.read_text())
    for part in name.split("."):
        children = {
            child.name: child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        node = children[part]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return (node.end_lineno or 0) - node.lineno + 1


def test_the_tour_has_ten_stops_in_ten_files() -> None:
    assert len({path for path, _ in ANCHORS}) == FILES
    stops = re.findall(r"^## (\d+)\. ", (PROJECT_ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
    assert stops == [str(number + 1) for number in range(FILES)]


def test_what_the_tour_names_exists_and_is_short() -> None:
    found = {f"{path}::{name}": lines_of(PROJECT_ROOT / path, name) for path, name in ANCHORS}
    assert sum(found.values()) <= LINES, found


def test_the_tour_itself_is_short() -> None:
    assert len((PROJECT_ROOT / "docs" / "tour.md").read_text().split()) <= 900
