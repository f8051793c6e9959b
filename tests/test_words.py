"""The words of the project: names of classes, the glossary, and the help texts."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.ops.cli.commands import run, single_commands
from quire.ops.paths import PROJECT_ROOT

# --- class names ------------------------------------------------------------------------------------------------------
# Each class name of the project has one meaning, so the name alone says which class is meant.


FOLDERS = ("gateway", "worker", "shared", "kernels", "ops", "models")


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((PROJECT_ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(PROJECT_ROOT)}:{node.lineno}")
    assert len(places) > 400
    assert not {name: found for name, found in places.items() if len(found) > 1}, "rename all but one class of a name"


# --- glossary ---------------------------------------------------------------------------------------------------------
# docs/glossary.md is in step with the code: every entry cites code, and every name that it cites exists.


TEXT = (PROJECT_ROOT / "docs" / "glossary.md").read_text()
ENTRIES = dict(re.findall(r"^### (.+?)\n\n(.+?)(?=\n#|\Z)", TEXT, re.MULTILINE | re.DOTALL))


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


@pytest.mark.parametrize("term", ENTRIES)
def test_an_entry_cites_code_that_exists(term: str) -> None:
    files = cited(ENTRIES[term])
    assert files, f"{term} cites no code"
    for name, wanted in files:
        path = PROJECT_ROOT / name
        assert path.is_file(), name
        if path.suffix == ".py":
            assert wanted, f"{name} is cited without a name in it"
            assert set(wanted) <= names_of(path), name


# --- help -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [60, 100])
def test_help_is_as_wide_as_the_terminal_and_breaks_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples are commands to paste, and stay on one line."""
    for arguments in ([], ["keys", "--help"], *([*name.split(), "--help"] for name in single_commands())):
        monkeypatch.setenv("COLUMNS", "2000")
        run(arguments, {})
        whole = capsys.readouterr().out.split()
        monkeypatch.setenv("COLUMNS", str(width))
        run(arguments, {})
        shown = capsys.readouterr().out
        assert shown.split() == whole
        texts = [line for line in shown.partition("\nexamples:")[0].splitlines() if not re.match("  [-A-Z]", line)]
        assert [line for line in texts if len(line) > width] == [], arguments
