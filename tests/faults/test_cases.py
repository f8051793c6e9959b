"""README.md of this folder names a test for every case, and every named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
CASES = 35


def rows() -> dict[str, list[str]]:
    """Return the tests of each case of the table."""
    found = re.findall(r"^\| (\d+|\+) \|[^|]+\|(.+)\|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return {case: re.findall(r"`(test_\w+)`", tests) for case, tests in found}


def functions() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return every test of this folder by name."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for path in FOLDER.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                assert node.name not in found, "two tests of one name: the table cannot tell them apart"
                found[node.name] = node
    return found


def test_every_case_has_a_test_and_every_test_that_is_named_is_there() -> None:
    table, there = rows(), functions()
    assert list(table) == [*map(str, range(1, CASES + 1)), "+"]
    assert all(table.values())
    assert [name for names in table.values() for name in names if name not in there] == []
