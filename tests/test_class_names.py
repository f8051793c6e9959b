"""Each class name of the project has one meaning, so the name alone says which class is meant."""

from __future__ import annotations

import ast
from collections import defaultdict

from quire.ops.paths import PROJECT_ROOT

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
