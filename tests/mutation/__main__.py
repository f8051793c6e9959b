"""Break the code at random places, and count the mutants that the tests notice.

  python -m tests.mutation                         all rooms, 40 mutants each; about an hour on two cores
  python -m tests.mutation --room worker/engine    one room
  python -m tests.mutation --mutants 200 --seed 2  more, and other ones

For each room: its tests run once, to record which test runs which line and how long it takes. Then each mutant is
written into a copy of the tree, and the tests that run its line are run, the quickest first, until one fails. A mutant
that no test fails for has survived. The copies are under build/mutation, and so are the results, as JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from tests.mutation.mutants import Mutant, sample

ROOT = Path(__file__).resolve().parents[2]
# The folders of the code, and the tests that are run for its mutants.
ROOMS = {
    "worker/engine": (["worker/engine"], ["tests/worker/engine"]),
    "worker/queue": (["worker/queue"], ["tests/worker/queue", "tests/worker/test_service.py"]),
    "shared/protocol/broker": (
        ["shared/protocol/broker"],
        ["tests/shared/broker", "tests/shared/test_limits_machine.py"],
    ),
    "shared/protocol/scripts": (
        ["shared/protocol/scripts"],
        [
            "tests/shared/broker",
            "tests/shared/accounts",
            "tests/shared/test_limits_machine.py",
            "tests/gateway/features/batches",
        ],
    ),
    "gateway/stream": (
        ["gateway/stream"],
        [
            "tests/gateway/stream",
            "tests/gateway/test_dialects.py",
            "tests/gateway/api",
            "tests/gateway/output",
            "tests/gateway/serving",
        ],
    ),
    "gateway/serving": (
        ["gateway/serving"],
        [
            "tests/gateway/serving",
            "tests/gateway/api/test_bodies.py",
            "tests/gateway/test_dialects.py",
            "tests/gateway/features/batches/test_lines.py",
            "tests/gateway/features/keys",
            "tests/gateway/features/parking",
            "tests/gateway/features/several_models",
            "tests/gateway/routes",
            "tests/gateway/admission",
        ],
    ),
    "shared/accounts": (
        ["shared/accounts"],
        [
            "tests/shared/accounts",
            "tests/shared/test_limits_machine.py",
            "tests/gateway/features/keys",
            "tests/gateway/features/admin",
        ],
    ),
}
# Seconds of tests for one mutant. Those of its room come first.
SECONDS_PER_MUTANT = 45.0
ALL_MARKS = "not soak and not faults and not alone"
# These tests break the scripts themselves, at texts that a mutant may have changed.
PATCHING = "test_the_machine_finds"


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    mutant:  its name
    outcome: killed, survived, unreached (no test runs the line), or equivalent (it changes nothing, for a known reason)
    tests:   number of tests that run its line
    """

    room: str
    mutant: str
    line: int
    outcome: str
    tests: int


@dataclass(frozen=True)
class Record:
    """What the run without a mutant showed.

    seconds: of each test that passed
    lines:   for each file and line the tests that run it
    scripts: for each Lua script the tests that call it
    near:    beginning of the names of the room's own tests, which come first
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]
    scripts: dict[str, list[str]]
    near: str

    def _scripts_with(self, part: str) -> list[str]:
        """Return the scripts that have the functions of a shared part such as `_limits`; another name is a script."""
        from quire.shared.protocol.broker.scripts import BATCH_SCRIPTS

        if not part.startswith("_"):
            return [part]
        return [name for name in self.scripts if (name in BATCH_SCRIPTS) == (part == "_batches")]

    def tests_of(self, mutant: Mutant, root: Path) -> list[str]:
        """Return the tests to run for a mutant, the quickest of the room first, for at most SECONDS_PER_MUTANT."""
        if mutant.path.endswith(".lua"):
            tests = set().union(*(self.scripts.get(name, ()) for name in self._scripts_with(Path(mutant.path).stem)))
        else:
            lines = self.lines.get(mutant.path, {})
            tests = set().union(*(lines.get(line, ()) for line in _statement(root / mutant.path, mutant.line)))
        chosen, total = [], 0.0
        found = tests & self.seconds.keys()
        for test in sorted(found, key=lambda test: (not test.startswith(self.near), self.seconds[test])):
            total += self.seconds[test]
            if chosen and total > SECONDS_PER_MUTANT:
                break
            chosen.append(test)
        return chosen


def _statement(path: Path, line: int) -> range:
    """Return the lines of the innermost statement at this line.

    Of a compound statement they are those of its head. The head of a function runs when its module is imported, so they
    are those of its body.
    """
    lines = range(line, line + 1)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (end := node.end_lineno or line):
            body = getattr(node, "body", None)
            start = body[0].lineno if isinstance(body, list) else end + 1
            if line < start:
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                lines = range(start, end + 1) if is_function else range(node.lineno, start)
    return lines


def record(tree: Path, room: str) -> Record:
    """Run the room's tests once in `tree`."""
    sources, tests = ROOMS[room]
    output = tree / "build" / "record.json"
    output.parent.mkdir(exist_ok=True)
    data = tree / "build" / "coverage"
    config = tree / "build" / "coveragerc"
    config.write_text(f"[run]\nsource = {', '.join(sources)}\ndata_file = {data}\n")
    arguments = [path for path in tests if (tree / path).exists()]
    _pytest(
        tree,
        ["-p", "tests.mutation.recorder", "-m", ALL_MARKS, "-k", f"not {PATCHING}", *arguments],
        3600,
        ["-m", "coverage", "run", f"--rcfile={config}"],
    )
    found = json.loads(output.read_text())
    if found["failed"]:
        print(f"{room}: {len(found['failed'])} tests fail or are skipped without a mutant", file=sys.stderr)
    from coverage import CoverageData

    coverage = CoverageData(str(data))
    coverage.read()
    lines: dict[str, dict[int, set[str]]] = {}
    for file in coverage.measured_files():
        contexts = coverage.contexts_by_lineno(file)
        lines[str(Path(file).relative_to(tree))] = {line: set(names) - {""} for line, names in contexts.items()}
    near = "tests/shared/" if room.startswith("shared/") else tests[0]
    return Record(found["seconds"], lines, found["scripts"], near)


def _pytest(tree: Path, arguments: list[str], timeout_s: float, prefix: list[str] = []) -> int:  # noqa: B006
    """Run pytest in `tree`; return its exit code, or -1 after `timeout_s`."""
    environ = {
        **{name: text for name, text in os.environ.items() if not name.startswith("QUIRE_")},
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "QUIRE_MUTATION_RECORD": str(tree / "build" / "record.json"),
    }
    command = [sys.executable, *prefix, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *arguments]
    with open(tree / "build" / "pytest.log", "w") as log:
        process = subprocess.Popen(command, cwd=tree, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def copy_tree(root: Path, target: Path) -> None:
    """Copy the tracked and new files of `root`, and what its tests built."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (root / name).exists() or (root / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)
    built = root / "kernels" / "cpu" / "_build"
    if built.exists():
        shutil.copytree(built, target / "kernels" / "cpu" / "_build", symlinks=True)
    (target / "build").mkdir(exist_ok=True)
    shutil.copytree(Path(__file__).parent, target / "tests" / "mutation", dirs_exist_ok=True)


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Write the mutant's file, and put the old one back afterwards."""
    path = tree / mutant.path
    source = path.read_text()
    path.write_text(mutant.code)
    try:
        yield
    finally:
        path.write_text(source)


def is_killed(tree: Path, mutant: Mutant, tests: list[str], seconds: float) -> bool:
    """Return whether one of the tests fails, or they do not end."""
    arguments = tree / "build" / "tests.txt"
    arguments.write_text("\n".join(tests))
    with mutated(tree, mutant):
        code = _pytest(tree, ["-x", "--timeout", "60", f"@{arguments}"], 60 + 5 * seconds)
    if code not in (-1, 0, 1, 2, 3, 4):  # 2 to 4: the mutant cannot be imported, or a fixture of a folder breaks
        raise RuntimeError(f"pytest ended with {code}: {tree / 'build' / 'pytest.log'}")
    return code != 0


def measure(root: Path, rooms: list[str], number: int, seed: int, known: dict[str, str]) -> list[Result]:
    """Return the result of each mutant of the rooms. known: for mutants that change nothing, the reason."""
    trees: Queue[Path] = Queue()
    for at in range(os.cpu_count() or 1):
        copy_tree(root, ROOT / "build" / "mutation" / str(at))
        trees.put(ROOT / "build" / "mutation" / str(at))

    def record_room(room: str) -> Record:
        tree = trees.get()
        try:
            return record(tree, room)
        finally:
            trees.put(tree)

    def run(room: str, mutant: Mutant, recorded: Record) -> Result:
        tree = trees.get()
        try:
            tests = recorded.tests_of(mutant, tree)
            if not tests:
                outcome = "unreached"
            else:
                killed = is_killed(tree, mutant, tests, sum(recorded.seconds[test] for test in tests))
                outcome = "killed" if killed else "survived"
            if outcome != "killed" and mutant.name in known:
                outcome = "equivalent"
        finally:
            trees.put(tree)
        result = Result(room, mutant.name, mutant.line, outcome, len(tests))
        print(f"{outcome:10} {mutant.path}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        records = dict(zip(rooms, pool.map(record_room, rooms), strict=True))
        jobs = [
            pool.submit(run, room, mutant, records[room])
            for room in rooms
            for mutant in sample(root, _sources(root, room), number, seed)
        ]
        return [job.result() for job in jobs]


def _sources(root: Path, room: str) -> list[str]:
    paths = [path for folder in ROOMS[room][0] for kind in ("*.py", "*.lua") for path in (root / folder).rglob(kind)]
    return sorted(str(path.relative_to(root)) for path in paths if path.name != "__init__.py")


def table(results: list[Result]) -> str:
    """Return the share of mutants killed by room, as a Markdown table. Equivalent mutants are not counted."""
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for result in results:
        rooms[result.room][result.outcome] += 1
    lines = ["| room | mutants | killed | survived | no test runs the line | equivalent |", "|---|---|---|---|---|---|"]
    for room, counts in rooms.items():
        total = counts["killed"] + counts["survived"] + counts["unreached"]
        share = f"{counts['killed'] / max(total, 1):.0%}"
        lines.append(
            f"| `{room}` | {total} | {share} | {counts['survived']} | {counts['unreached']} | {counts['equivalent']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", action="append", choices=ROOMS, help="a room to measure; again for several")
    parser.add_argument("--mutants", type=int, default=40, help="mutants of each room (default 40)")
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutants (default 1)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout to measure, with this one's tool")
    arguments = parser.parse_args()
    known = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())
    results = measure(
        arguments.tree, arguments.room or list(ROOMS), arguments.mutants, arguments.seed,
        {mutant: reason for reason, mutants in known.items() for mutant in mutants["mutants"]},
    )  # fmt: skip
    output = ROOT / "build" / "mutation" / "results.json"
    output.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
