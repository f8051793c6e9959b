"""Installs clients into environments of their own, and runs programs with them.

The clients need other versions of their packages than Quire and than each other, so they cannot be development
dependencies. An environment is made once per list of pinned requirements, and kept in the cache of pytest. With
TEST_OUTSIDE=newest the pins are left out, and an environment is made once a day.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environ

PROGRAMS = Path(__file__).parent / "programs"
NEWEST = os.environ.get("TEST_OUTSIDE") == "newest"
INSTALL_TIMEOUT_S = 900
RUN_TIMEOUT_S = 300
WRITE_TIMEOUT_S = 900
# Parts of the messages of pip and npm if no package index answers.
UNREACHABLE = ("connection broken by", "ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH")
# No client may send anything to another server than the one under test, or read a key of the user.
PRIVATE = {
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "INSTRUCTOR_TELEMETRY": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


@dataclass(frozen=True)
class Case:
    """The outcome of one case of a program: its result, or the text of its exception."""

    result: Any
    error: str

    def value(self) -> Any:
        """The result. Fails the test if the case raised an exception."""
        assert not self.error, self.error
        return self.result


def wanted(requirements: Sequence[str], newest: bool = NEWEST) -> list[str]:
    """Return the requirements of pip or packages of npm as they are, or for `newest` without their versions."""
    return [re.sub(r"(?<=.)(==|@).*", "", one) if newest else one for one in requirements]


class Environments:
    """The environments of clients in one folder."""

    def __init__(self, folder: Path, newest: bool = NEWEST) -> None:
        self._folder = folder
        self._newest = newest

    def run_python(
        self,
        program: str,
        url: str,
        requirements: Sequence[str],
        arguments: Sequence[str] = (),
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> dict[str, Case]:
        """Run a program of `programs/` with Python and the packages of `requirements`; returns its cases by name.

        arguments: of the program, after the URL. Skips the test if the packages cannot be downloaded.
        """

        def install(place: Path) -> None:
            run([sys.executable, "-m", "venv", str(place)], self._folder, INSTALL_TIMEOUT_S)
            install_packages(
                [str(place / "bin" / "python"), "-m", "pip", "install", "--retries", "1", *packages], place
            )

        packages = wanted(requirements, self._newest)
        place = self.environment("python", packages, install)
        return _cases([str(place / "bin" / "python"), str(PROGRAMS / program), url, *arguments], timeout_s=timeout_s)

    def run_beside_quire(self, program: str, arguments: Sequence[str], requirements: Sequence[str]) -> dict[str, Case]:
        """Run a program with Quire's Python, and these packages in front of Quire's; returns its cases by name.

        program: of `programs/`. requirements: all packages that are needed; for programs that need Quire's torch,
        which is large. Skips the test if the packages cannot be downloaded.
        """

        def install(place: Path) -> None:
            place.mkdir()
            pip = [sys.executable, "-m", "pip", "install", "--retries", "1", "--no-deps", "--target", str(place)]
            install_packages([*pip, *packages], place)

        packages = wanted(requirements, self._newest)
        place = self.environment("beside", packages, install)
        command = [sys.executable, str(PROGRAMS / program), *arguments]
        with tempfile.TemporaryDirectory() as folder:  # for what the packages write beside their result, such as logs
            return _cases(command, {"PYTHONPATH": str(place)}, WRITE_TIMEOUT_S, Path(folder))

    def run_node(self, program: str, url: str, packages: Sequence[str]) -> dict[str, Case]:
        """Run a program of `programs/` with Node.js and the npm packages; returns its cases by name.

        Skips the test if there is no npm, or the packages cannot be downloaded.
        """
        place = self.node(packages)
        for source in PROGRAMS.glob("*.mjs"):  # Node.js looks for packages next to the program
            shutil.copy(source, place)
        return _cases(["node", str(place / program), url])

    def node(self, packages: Sequence[str], scripts: Sequence[str] = ()) -> Path:
        """Return a folder with the npm packages, in `node_modules`.

        scripts: of packages, which put their programs into place; no other script of a package runs. Skips the test if
        there is no npm, or the packages cannot be downloaded.
        """
        if not shutil.which("npm"):
            pytest.skip("npm is not installed")

        def install(place: Path) -> None:
            place.mkdir()
            (place / "package.json").write_text('{"private": true, "type": "module"}\n')
            install_packages(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *names], place)
            for script in scripts:
                at = place / "node_modules" / script
                run(["node", at.name], at.parent, INSTALL_TIMEOUT_S)

        names = wanted(packages, self._newest)
        return self.environment("node", [*names, *scripts], install)

    def environment(self, kind: str, requirements: Sequence[str], install: Callable[[Path], None]) -> Path:
        """Make an environment unless it is complete; returns its folder. One process makes it at a time."""
        day = [datetime.now(UTC).date().isoformat()] if self._newest else []
        key = hashlib.sha256(json.dumps([sys.version, *sorted(requirements), *day]).encode()).hexdigest()[:16]
        place = self._folder / f"{kind}-{key}"
        complete = self._folder / f"{kind}-{key}.complete"
        with (self._folder / f"{kind}-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(place, ignore_errors=True)
                install(place)
                complete.write_text("\n".join(requirements) + "\n")
        print(*_versions(place), sep="\n")  # pytest shows them when the test fails
        return place


def downloaded(config: pytest.Config, requirement: str, *options: str) -> Path:
    """Return the archive of a package, as pip downloads it with these options. Skips the test without an index."""
    assert config.cache is not None

    def download(place: Path) -> None:
        place.mkdir()
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", *options]
        install_packages([*pip, "--dest", str(place), *wanted([requirement])], place)

    folder = Environments(config.cache.mkdir("quire-clients")).environment("archive", wanted([requirement]), download)
    (archive,) = folder.iterdir()
    return archive


def _versions(place: Path) -> list[str]:
    """Return the names and versions of the packages in an environment."""
    folders = [str(path) for path in (place, *place.glob("lib/python*/site-packages"))]
    python = {f"{one.name}=={one.version}" for one in distributions(path=folders)}
    manifests = (*place.glob("node_modules/*/package.json"), *place.glob("node_modules/@*/*/package.json"))
    node = {f"{one['name']}@{one.get('version')}" for one in (json.loads(path.read_text()) for path in manifests)}
    return sorted(python | node)


def install_packages(command: list[str], place: Path) -> None:
    done = run(command, place, INSTALL_TIMEOUT_S, check=False)
    if done.returncode == 0:
        return
    said = done.stdout + done.stderr
    if any(sign in said for sign in UNREACHABLE):
        pytest.skip(f"no package index can be reached: {said.strip().splitlines()[-1]}")
    raise AssertionError(f"{' '.join(command)}: {said[-4000:]}")


def run(
    command: list[str],
    cwd: Path,
    timeout_s: float,
    check: bool = True,
    variables: dict[str, str] | None = None,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command without the user's keys; returns its output.

    variables: of its environment, more or others. text: its standard input.
    """
    foreign = ("OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_")
    environ = {name: value for name, value in clean_environ().items() if not name.startswith(foreign)} | PRIVATE
    environ |= variables or {}
    return subprocess.run(
        command, cwd=cwd, env=environ, timeout=timeout_s, capture_output=True, text=True, check=check, input=text
    )


def _cases(
    command: list[str],
    variables: dict[str, str] | None = None,
    timeout_s: float = RUN_TIMEOUT_S,
    cwd: Path = PROGRAMS,
) -> dict[str, Case]:
    """Return the cases that a program prints, a line of JSON each: `{"case": ..., "result": ..., "error": ...}`."""
    done = run(command, cwd, timeout_s, check=False, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: Case(line.get("result"), line.get("error", "")) for line in lines}
