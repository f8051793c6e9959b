"""Prints the tests of what changed since a commit, for `make check`: test files, and the test folders of other files.

A file of the project has its tests in the folder of the same name under `tests`; where there is none, in the nearest
folder above it.

    python -m quire.ops.tools.changed_tests [COMMIT]

COMMIT is by default the commit at which this branch left its upstream, or HEAD if it has none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

from quire.ops.paths import PROJECT_ROOT

# Tests of files whose place does not name them.
ELSEWHERE = {
    "docker-compose.yml": "tests/outside/deploy",
    "pyproject.toml": "tests/ops/test_packaging.py",
    "docs": "tests/test_docs.py",
    "ops/deploy": "tests/outside/deploy",
    "shared/protocol/broker": "tests/shared/broker",
    "shared/protocol/scripts": "tests/shared/broker",
}


def place_of(path: str) -> str:
    """Return the test file or folder of a file, relative to the project; empty if it has none.

    path: of the file, relative to the project. The whole of `tests` is never returned.
    """
    place = PurePosixPath(path)
    if place.name.startswith("test_") and (PROJECT_ROOT / place).is_file():
        return path
    for folder in (place, *place.parents):
        if listed := ELSEWHERE.get(str(folder)):
            return listed
    for folder in place.parents:
        tests = folder if folder.parts[:1] == ("tests",) else "tests" / folder
        # The helpers of the tests belong to all of them.
        if len(tests.parts) > 1 and tests.parts[1] != "support" and (PROJECT_ROOT / tests).is_dir():
            return str(tests)
    return ""


def chosen(paths: Iterable[str]) -> list[str]:
    """Return the tests of files, without those inside of others."""
    places = {tests for path in paths if (tests := place_of(path))}
    return sorted(
        place for place in places if not any(str(parent) in places for parent in PurePosixPath(place).parents)
    )


def changed(commit: str) -> list[str]:
    """Return the files that differ from a commit, and those that git does not know yet."""
    lists = (("diff", "--name-only", commit), ("ls-files", "--others", "--exclude-standard"))
    return [path for arguments in lists for path in _git(*arguments).splitlines()]


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=PROJECT_ROOT, check=True, capture_output=True, text=True).stdout


def _default_commit() -> str:
    try:
        return _git("merge-base", "HEAD", "@{upstream}").strip()
    except subprocess.CalledProcessError:
        return "HEAD"


if __name__ == "__main__":
    print(*chosen(changed(sys.argv[1] if len(sys.argv) > 1 else _default_commit())))
