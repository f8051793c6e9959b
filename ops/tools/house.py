"""Prints the size of each feature and of the main path, and the doors of each feature. `make lint` holds the budgets.

    python -m quire.ops.tools.house

Code lines are lines without blanks, comments and docstrings. A feature is a set of files (house.toml). A door is a file
outside of a feature that imports one of its modules. Files of no feature are the main path: a call in, tokens out. A
room is a folder of a service, or the files beside these folders.

Imports among the modules of kernels/ are no doors. The arithmetic is one contract (kernels/ops.py) with several
implementations, and each of them names the kinds of weights and arguments that it computes. The sum of all doors with
these imports is printed too.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import grimp

from quire.ops.paths import PROJECT_ROOT

CONFIG = Path(__file__).with_name("house.toml")
CORE = ("gateway", "worker", "kernels", "shared")
OTHERS = ("ops", "models", "tests")
# Comments, by the end of the file's name.
COMMENTS = {
    ".lua": re.compile(r"--.*"),
    ".js": re.compile(r"/\*.*?\*/|^\s*//[^\n]*", re.DOTALL | re.MULTILINE),
    ".css": re.compile(r"/\*.*?\*/", re.DOTALL),
    ".html": re.compile(r"<!--.*?-->", re.DOTALL),
    ".cpp": re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL),
    ".h": re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL),
}


@dataclass
class Feature:
    """files: patterns of paths. doors, lines: its budgets, then what was counted."""

    name: str
    files: list[str]
    doors: int
    lines: int
    found_doors: set[str] = field(default_factory=set)
    # The files of kernels/ that import a module of kernels/; they are no doors.
    in_kernels: set[str] = field(default_factory=set)
    found_lines: int = 0

    def has(self, path: str) -> bool:
        return any(fnmatch(path, pattern) for pattern in self.files)


def code_lines(path: Path) -> int:
    """Return the number of lines of code in a file; 0 if it is of another kind."""
    if path.suffix == ".py":
        return len(_python_lines(path.read_text()))
    if pattern := COMMENTS.get(path.suffix):
        return sum(bool(line.strip()) for line in pattern.sub("", path.read_text()).splitlines())
    return 0


def _python_lines(source: str) -> set[int]:
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def files_of(*folders: str) -> Iterator[tuple[str, Path]]:
    """Yield the files below the folders: the path in the project, and the file.

    Compiled kernels and the libraries of others are left out."""
    for folder in folders:
        for path in sorted((PROJECT_ROOT / folder).rglob("*")):
            if path.is_file() and not {"_build", "__pycache__", "vendor"} & set(path.relative_to(PROJECT_ROOT).parts):
                yield str(path.relative_to(PROJECT_ROOT)), path


def _file_of(module: str) -> str:
    """Return the path of a module, or of the `__init__.py` of a package, in the project."""
    path = module.removeprefix("quire.").replace(".", "/")
    return f"{path}/__init__.py" if (PROJECT_ROOT / path).is_dir() else f"{path}.py"


def room_of(path: str) -> str:
    """Return the room of a file of a service: its folder in the service, or the service itself."""
    service, *inner = path.split("/")
    return f"{service}/{inner[0]}" if len(inner) > 1 else service


def read_budgets() -> tuple[list[Feature], dict[str, int], dict[str, int]]:
    """Return the features of house.toml, the budgets of the main path by room, and those of all together."""
    config = tomllib.loads(CONFIG.read_text())
    features = [Feature(name, **entry) for name, entry in config["features"].items()]
    return features, config["main_path"], config["together"]


def survey(features: list[Feature]) -> tuple[Counter[str], Counter[str]]:
    """Count lines and doors of features. Return lines of the main path by room, and lines of the project by folder."""
    owners: dict[str, Feature] = {}
    main: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for name, path in files_of(*CORE):
        lines = code_lines(path)
        folders[name.split("/")[0]] += lines
        owner = next((feature for feature in features if feature.has(name)), None)
        if owner is None:
            main[room_of(name)] += lines
        else:
            owners[name] = owner
            owner.found_lines += lines
    graph = grimp.build_graph("quire")
    for module in graph.modules:
        owner = owners.get(_file_of(module))
        if owner is None:
            continue
        for importer in graph.find_modules_that_directly_import(module):
            name = _file_of(importer)
            if not name.startswith(CORE) or owners.get(name) is owner:
                continue
            is_inside = name.startswith("kernels/") and module.startswith("quire.kernels.")
            (owner.in_kernels if is_inside else owner.found_doors).add(name)
    for name, path in files_of(*OTHERS):
        folders[name.split("/")[0]] += code_lines(path)
    return +main, folders


def words_of_docs() -> int:
    """Return the number of words in docs/ and in the READMEs."""
    pages = [path for name, path in files_of("docs") if path.suffix == ".md"]
    pages += [PROJECT_ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return sum(len(page.read_text().split()) for page in pages)


def main() -> int:
    """Print the tables; return 1 if a budget is exceeded."""
    features, rooms, together = read_budgets()
    main_path, folders = survey(features)
    over = defaultdict(list)
    print(f"{'feature':<22}{'lines':>8}{'budget':>8}{'doors':>8}{'budget':>8}")
    for feature in sorted(features, key=lambda feature: -feature.found_lines):
        doors = len(feature.found_doors)
        print(f"{feature.name:<22}{feature.found_lines:>8}{feature.lines:>8}{doors:>8}{feature.doors:>8}")
        if feature.found_lines > feature.lines:
            over[feature.name].append(f"{feature.found_lines} lines, budget {feature.lines}")
        if doors > feature.doors:
            over[feature.name].append(
                f"{doors} doors, budget {feature.doors}: {', '.join(sorted(feature.found_doors))}"
            )
    doors, inside = (
        sum(map(len, sets)) for sets in zip(*((f.found_doors, f.in_kernels) for f in features), strict=True)
    )
    print(f"{'sum':<22}{sum(f.found_lines for f in features):>8}{'':>8}{doors:>8}{together['doors']:>8}")
    if doors > together["doors"]:
        over["all features"].append(f"{doors} doors, budget {together['doors']}")
    print(f"{'with those in kernels':<22}{'':>16}{doors + inside:>8}")
    for room, lines in sorted(main_path.items()):
        budget = rooms.get(room, 0)
        print(f"{room:<22}{lines:>8}{budget:>8}")
        if lines > budget:
            over[f"main path in {room}"].append(f"{lines} lines, budget {budget}")
    lines, budget = main_path.total(), together["main_path"]
    print(f"{'main path':<22}{lines:>8}{budget:>8}")
    if lines > budget:
        over["main path"].append(f"{lines} lines, budget {budget}")
    for folder, lines in folders.items():
        print(f"{folder + '/':<22}{lines:>8}")
    print(f"{'words of documents':<22}{words_of_docs():>8}")
    for name, reasons in over.items():
        print(f"{name}: {'; '.join(reasons)}. Make it smaller, or raise the budget in {CONFIG.name}.", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
