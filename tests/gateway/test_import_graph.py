"""The import graph of the gateway is small, and has no cycle.

An arrow is an import of one module of the gateway by another, also one inside a function or under TYPE_CHECKING. The
layer of a module is the number of modules in the longest chain of imports that begins with it.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import sys
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT

PACKAGE = "quire.gateway"
# The command line starts `main` and is not a part of the service: two layers and five arrows more.
COMMAND_LINE = ("__main__.py", "commands.py")
# A change may lower MAX_LAYERS and MAX_ARROWS, but not raise them.
MAX_LAYERS = 8
MAX_ARROWS = 140


def modules(folder: Path) -> dict[str, Path]:
    """Returns the file of each module, without the `__init__` files of packages and the command line."""
    return {
        ".".join([PACKAGE, *path.relative_to(folder).with_suffix("").parts]): path
        for path in folder.rglob("*.py")
        if path.name not in ("__init__.py", *COMMAND_LINE)
    }


def imported(tree: ast.Module, names: set[str]) -> set[str]:
    """Returns which of the modules `names` a module imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & names


def graph(folder: Path) -> dict[str, set[str]]:
    """Returns the modules that each module imports."""
    files = modules(folder)
    return {name: imported(ast.parse(path.read_text()), set(files)) for name, path in files.items()}


def layers(arrows: dict[str, set[str]]) -> dict[str, int]:
    """Returns the layer of each module, from 1. Raises CycleError."""
    found: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(arrows).static_order():
        found[name] = 1 + max((found[one] for one in arrows[name]), default=0)
    return found


GRAPH = graph(PROJECT_ROOT / "gateway")


def test_the_graph_is_that_of_the_package() -> None:
    """Importing a module imports the targets of all its arrows, except those under TYPE_CHECKING."""
    assert f"{PACKAGE}.main" in GRAPH
    assert f"{PACKAGE}.app" in GRAPH[f"{PACKAGE}.main"]
    for name, targets in GRAPH.items():
        importlib.import_module(name)
        assert targets <= sys.modules.keys()


def test_no_module_imports_itself_through_others() -> None:
    try:
        layers(GRAPH)
    except graphlib.CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")


def test_the_layers_are_few() -> None:
    found = layers(GRAPH)
    assert max(found.values()) <= MAX_LAYERS, sorted(found.items(), key=lambda item: -item[1])[:MAX_LAYERS]


def test_the_arrows_are_few() -> None:
    assert sum(map(len, GRAPH.values())) <= MAX_ARROWS


def test_a_cycle_and_a_chain_are_found(tmp_path: Path) -> None:
    """The package of this test has a cycle and a chain. The functions above find every kind of import."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").touch()
    (tmp_path / "a.py").write_text("from quire.gateway.room import b\nimport quire.gateway.c\n")
    (tmp_path / "room" / "b.py").write_text("def late():\n    from quire.gateway.c import thing\n")
    (tmp_path / "c.py").write_text("import json\n")
    found = graph(tmp_path)
    a, b, c = "quire.gateway.a", "quire.gateway.room.b", "quire.gateway.c"
    assert found == {a: {b, c}, b: {c}, c: set()}
    assert layers(found) == {c: 1, b: 2, a: 3}
    (tmp_path / "c.py").write_text("if TYPE_CHECKING:\n    from quire.gateway.a import thing\n")
    with pytest.raises(graphlib.CycleError):
        layers(graph(tmp_path))
