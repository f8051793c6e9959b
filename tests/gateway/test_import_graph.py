"""The import graph of the gateway is small, and neither its modules nor its rooms have a cycle.

An arrow is an import of one module of the gateway by another, also one inside a function or under TYPE_CHECKING. A room
is a folder of the gateway, or a module outside of these folders. Each feature is a room. The bounds on rooms
hold for the main path, which is all rooms that are no features: import-linter and the budgets of
`quire.ops.tools.house` hold the doors of features.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT

PACKAGE = "quire.gateway"
# The command line starts `main` and is not a part of the service: two layers and five arrows more.
COMMAND_LINE = ("__main__.py", "commands.py")
# As many as there are. An average per module would forbid to merge two small modules.
MAX_ARROWS = 913
MAX_ARROWS_OF_ONE_MODULE = 20
# The graph of rooms has the command line too: `__main__`, whose place Python fixes, belongs to the room of `commands`.
ENTRY_ROOM = "server"
# The folder whose folders are rooms, and no part of the main path.
FEATURES = "features"
MAX_ROOM_LAYERS = 8
# As many as there are. A change may lower this number, and none may raise it.
MAX_ROOM_ARROWS = 34


def modules(folder: Path, leaves_out: Collection[str] = COMMAND_LINE) -> dict[str, Path]:
    """Returns the file of each module, without the `__init__` files of packages and `leaves_out`."""
    return {
        ".".join([PACKAGE, *path.relative_to(folder).with_suffix("").parts]): path
        for path in folder.rglob("*.py")
        if path.name not in ("__init__.py", *leaves_out)
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


def graph(folder: Path, leaves_out: Collection[str] = COMMAND_LINE) -> dict[str, set[str]]:
    """Returns the modules that each module imports."""
    files = modules(folder, leaves_out)
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
    assert f"{PACKAGE}.server.main" in GRAPH
    assert f"{PACKAGE}.server.app" in GRAPH[f"{PACKAGE}.server.main"]
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
    first, *rest = name.removeprefix(f"{PACKAGE}.").split(".")
    if first == FEATURES:
        return f"{first}.{rest[0]}"
    return ENTRY_ROOM if first == "__main__" else first


def rooms(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the rooms that the modules of each room import, from the modules that each module imports."""
    found: dict[str, set[str]] = {}
    for name, targets in arrows.items():
        found.setdefault(room(name), set()).update({room(target) for target in targets} - {room(name)})
    return found


ROOMS = rooms(graph(PROJECT_ROOT / "gateway", leaves_out=()))
MAIN_PATH = {
    name: {one for one in targets if not one.startswith(FEATURES)}
    for name, targets in ROOMS.items()
    if not name.startswith(FEATURES)
}


def test_modules_have_few_arrows() -> None:
    counts = {name: len(targets) for name, targets in GRAPH.items()}
    assert sum(counts.values()) <= MAX_ARROWS
    assert max(counts.values()) <= MAX_ARROWS_OF_ONE_MODULE, max(counts, key=lambda name: counts[name])


def test_rooms_have_few_layers_and_no_cycle() -> None:
    try:
        layers(ROOMS)
    except graphlib.CycleError as error:
        pytest.fail(f"a cycle of rooms: {' -> '.join(error.args[1])}")
    found = layers(MAIN_PATH)
    assert max(found.values()) <= MAX_ROOM_LAYERS, sorted(found.items(), key=lambda item: item[1])


def test_rooms_have_few_arrows() -> None:
    assert sum(len(targets) for targets in MAIN_PATH.values()) <= MAX_ROOM_ARROWS, MAIN_PATH


def test_modules_are_in_rooms() -> None:
    """A module outside of the folders would be a room of its own."""
    found = {path.name for path in (PROJECT_ROOT / "gateway").glob("*.py")}
    assert found == {"__init__.py", "__main__.py", "settings.py"}


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
    assert rooms(found) == {"a": {"room", "c"}, "room": {"c"}, "c": set()}
    (tmp_path / "c.py").write_text("if TYPE_CHECKING:\n    from quire.gateway.a import thing\n")
    with pytest.raises(graphlib.CycleError):
        layers(graph(tmp_path))
