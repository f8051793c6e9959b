"""The import graph of the gateway is small, and has no cycle.

An arrow is an import of one module of the gateway by another, also one inside a function or under TYPE_CHECKING. A room
is a folder of the gateway, or a module outside of these folders. The number of arrows grows with the features; the
bounds are the arrows per module, and the arrows between rooms.
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
MAX_ARROWS_PER_MODULE = 4.2
MAX_ARROWS_OF_ONE_MODULE = 19
# Each room with routes imports the directory of models, which stands between a path and a model; the directory refuses
# the models that a key may not use, so it imports the API's key policy. The routes of chats are a module of their own,
# so that `calls` does not import the directory. Files and batches are two rooms with 12 arrows: a line of a batch is
# read, admitted and answered by the parts of each API, so the room of batches imports what the routes of these import.
MAX_ROOM_ARROWS = 94


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


def room(name: str) -> str:
    """Returns the room of a module."""
    return name.removeprefix(f"{PACKAGE}.").split(".")[0]


def test_modules_have_few_arrows() -> None:
    counts = {name: len(targets) for name, targets in GRAPH.items()}
    assert sum(counts.values()) / len(counts) <= MAX_ARROWS_PER_MODULE
    assert max(counts.values()) <= MAX_ARROWS_OF_ONE_MODULE, max(counts, key=lambda name: counts[name])


def test_rooms_have_few_arrows() -> None:
    arrows = {(room(name), room(target)) for name, targets in GRAPH.items() for target in targets}
    between = {(one, other) for one, other in arrows if one != other}
    assert len(between) <= MAX_ROOM_ARROWS, sorted(between)


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
