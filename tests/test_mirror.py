"""Each module of the installed packages has a test file of its name, and each class name one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from quire.ops.paths import PROJECT_ROOT

FOLDERS = ("gateway", "worker", "shared", "kernels", "ops/cli", "ops/local", "ops/loadgen")
MODULES = [
    path.relative_to(PROJECT_ROOT)
    for folder in FOLDERS
    for path in sorted((PROJECT_ROOT / folder).rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
]
# A class name is unique over all of these folders.
NAMED_FOLDERS = ("gateway", "worker", "shared", "kernels", "ops", "models")


def test_the_modules_are_found() -> None:
    assert len(MODULES) > 200


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_a_test_file_of_its_name(module: object) -> None:
    path = PROJECT_ROOT / str(module)
    expected = PROJECT_ROOT / "tests" / path.relative_to(PROJECT_ROOT).parent / f"test_{path.name}"
    assert expected.is_file(), f"{expected.relative_to(PROJECT_ROOT)} is missing"


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in NAMED_FOLDERS:
        for path in sorted((PROJECT_ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(PROJECT_ROOT)}:{node.lineno}")
    assert len(places) > 400
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert not repeated, "rename all but one class of a name, so that the name alone says which one is meant"
