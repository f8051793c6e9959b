"""docs/glossary.md is in step with the code: every entry cites code, and every name that it cites exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT

TEXT = (PROJECT_ROOT / "docs" / "glossary.md").read_text()
ENTRIES = dict(re.findall(r"^### (.+?)\n\n(.+?)(?=\n#|\Z)", TEXT, re.MULTILINE | re.DOTALL))
MOST_SENTENCES = 4


def cited(entry: str) -> list[tuple[str, list[str]]]:
    """The files after *Code*, each with the names in brackets after it."""
    _, _, code = entry.partition("\nCode: ")
    return [
        (path, re.findall(r"`([^`]+)`", names or ""))
        for path, names in re.findall(r"`([\w/.]+)`(?:\s\(([^)]+)\))?", code)
    ]


def names_of(path: Path) -> set[str]:
    """The names that a module defines at its top level, and `Class.member` for methods and attributes."""
    return set(_names(ast.parse(path.read_text()).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in _names(node.body))
            yield from (f"{node.name}.{name}" for name in _assigned_to_self(node))


def _assigned_to_self(of: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(of):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            yield part.attr


def test_there_are_about_fifty_terms() -> None:
    assert len(ENTRIES) == TEXT.count("\n### ") >= 40


@pytest.mark.parametrize("term", ENTRIES)
def test_an_entry_is_short_and_cites_code_that_exists(term: str) -> None:
    prose, _, _ = ENTRIES[term].partition("\nCode: ")
    assert 1 <= len(re.findall(r"[.:](?:\s|$)", prose)) <= MOST_SENTENCES
    files = cited(ENTRIES[term])
    assert files, f"{term} cites no code"
    for name, wanted in files:
        path = PROJECT_ROOT / name
        assert path.is_file(), name
        if path.suffix == ".py":
            assert wanted, f"{name} is cited without a name in it"
            assert set(wanted) <= names_of(path), name
