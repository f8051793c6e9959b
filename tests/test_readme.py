"""Every command of the README is run, in its order, against the server that its first one starts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.cli import known_settings, pass_through
from ops.paths import PROJECT_ROOT
from ops.settings import ServeSettings
from ops.settings_table import with_table
from shared.settings import load
from tests.conftest import clean_environ

README = (PROJECT_ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PUBLISHED = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The README's first command; gives its URL."""
    assert blocks("bash")[0].strip() == "make run"
    environ = clean_environ(QUIRE_PORT="0", QUIRE_STATE_DIR=str(tmp_path_factory.mktemp("state")))
    process = subprocess.Popen(
        ["make", "run"], cwd=PROJECT_ROOT, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("ready: "))
    finally:
        # As Ctrl-C in a terminal does: to make and to all that it started.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
        process.stdout.close()


def run(command: list[str], url: str) -> str:
    """The output of a command, which must succeed and say something."""
    environ = clean_environ(QUIRE_CHAT_URL=url)
    done = subprocess.run(
        command, cwd=PROJECT_ROOT, env=environ, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    return done.stdout


@pytest.mark.parametrize("block", blocks("bash")[1:])
def test_a_command(block: str, server: str) -> None:
    output = run(["bash", "-euc", block.replace(PUBLISHED, server)], server)
    if "chat/completions" in block:
        assert output.rstrip().endswith("data: [DONE]")
    if "quire chat" in block:
        assert "fox" in output


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_example(block: str, server: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.replace(PUBLISHED, server))
    assert "heron" in run([sys.executable, str(script)], server)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which stands in for a browser's fetch")
@pytest.mark.parametrize("block", blocks("javascript"))
def test_a_javascript_example(block: str, server: str, tmp_path: Path) -> None:
    script = tmp_path / "example.mjs"
    script.write_text(block.replace(PUBLISHED, server))
    assert len(run(["node", str(script)], server).split()) > 10


def test_the_page_is_where_the_readme_says(server: str) -> None:
    assert f"<{PUBLISHED}>" in README
    assert "<title>" in run(["curl", "-sf", server + "/"], server)


@pytest.mark.parametrize(
    "line", [line for block in blocks("text") for line in block.splitlines() if line.startswith("quire serve")]
)
def test_the_flags_of_a_shown_command_exist(line: str) -> None:
    arguments, environ = pass_through(ServeSettings, shlex.split(line)[2:], {})
    load(ServeSettings, arguments, environ, prog="quire serve", known=known_settings())


def test_make_knows_the_verbs_that_the_readme_names() -> None:
    verbs = set(re.findall(r"make ([a-z]+)\b", "\n".join(text for _, text in BLOCKS)))
    assert verbs == {"run", "test", "soak"}
    for verb in verbs:
        subprocess.run(["make", "-n", verb], cwd=PROJECT_ROOT, check=True, stdout=subprocess.DEVNULL)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    assert with_table(README) == README, "run python -m ops.settings_table"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (PROJECT_ROOT / target).exists(), target
