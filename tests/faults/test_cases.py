"""README.md of this folder names a test for every case. Every named test exists, and CI runs one of each case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
CASES = 39


def rows() -> dict[str, list[str]]:
    """Return the tests of each case of the table."""
    found = re.findall(r"^\| (\d+|\+) \|[^|]+\|(.+)\|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return {case: re.findall(r"`(test_\w+)`", tests) for case, tests in found}


def marks_of_tests() -> dict[str, set[str]]:
    """Return the marks of every test of this folder, those of its module included."""
    found: dict[str, set[str]] = {}
    for path in FOLDER.glob("test_*.py"):
        body = ast.parse(path.read_text()).body
        common = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node).startswith("pytestmark")]
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                assert node.name not in found, "two tests of one name: the table cannot tell them apart"
                marks = [ast.unparse(one) for one in (*common, *node.decorator_list)]
                # The marks of single parameters are not those of the test.
                whole = [text for text in marks if not text.startswith("pytest.mark.parametrize")]
                found[node.name] = set(re.findall(r"pytest\.mark\.(\w+)", " ".join(whole)))
    return found


def test_every_case_has_tests_that_exist_and_one_of_them_runs_in_ci() -> None:
    table, marks = rows(), marks_of_tests()
    assert list(table) == [*map(str, range(1, CASES + 1)), "+"]
    assert [name for names in table.values() for name in names if name not in marks] == []
    in_ci = {name for name, own in marks.items() if "soak" not in own and ("promise" in own or "faults" not in own)}
    assert [case for case, names in table.items() if not in_ci.intersection(names)] == []
