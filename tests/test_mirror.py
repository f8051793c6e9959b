"""Tests mirror the tree: each module of the installed packages has a test file of its name."""

from __future__ import annotations

import pytest

from quire.ops.paths import PROJECT_ROOT

FOLDERS = ("gateway", "worker", "shared", "kernels", "ops/cli", "ops/local", "ops/loadgen")
MODULES = [
    path.relative_to(PROJECT_ROOT)
    for folder in FOLDERS
    for path in sorted((PROJECT_ROOT / folder).rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
]


def test_the_modules_are_found() -> None:
    assert len(MODULES) > 200


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_a_test_file_of_its_name(module: object) -> None:
    path = PROJECT_ROOT / str(module)
    expected = PROJECT_ROOT / "tests" / path.relative_to(PROJECT_ROOT).parent / f"test_{path.name}"
    assert expected.is_file(), f"{expected.relative_to(PROJECT_ROOT)} is missing"
