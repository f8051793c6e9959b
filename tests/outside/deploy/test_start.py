"""`quire-start`, the entry point of the images of gateway and worker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT

START = PROJECT_ROOT / "ops/deploy/containers/start.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the commands of the gateway's image, which print how they are called."""
    for name in ("quire-gateway", "quire-dead", "quire-keys", "quire-parking"):
        path = tmp_path / name
        path.write_text('#!/bin/sh\necho "$(basename "$0") $* url=${QUIRE_REDIS_URL:-}"\n')
        path.chmod(0o755)
    return tmp_path


def start(programs: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(programs), "/usr/bin", "/bin"])
    return subprocess.run(
        ["sh", str(START), *arguments], env={"PATH": path, **environ}, capture_output=True, text=True, check=False
    )


def test_the_first_word_names_the_command_and_the_rest_are_its_arguments(programs: Path) -> None:
    assert start(programs, "gateway", "--port", "8000").stdout == "quire-gateway --port 8000 url=\n"
    assert start(programs, "dead", "show", QUIRE_REDIS_URL="redis://r").stdout == "quire-dead show url=redis://r\n"
    assert start(programs, "keys", "list", QUIRE_REDIS_URL="redis://r").stdout == "quire-keys list url=redis://r\n"
    assert start(programs, "parking", "park").stdout == "quire-parking park url=\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no command '': give gateway, dead, keys, parking or worker"),
        (["serve"], "there is no command 'serve': give gateway, dead, keys, parking or worker"),
        (["worker"], "this image has no command worker; use the image of the other service"),
    ],
)
def test_a_command_that_the_image_does_not_have_is_refused(programs: Path, arguments: list[str], said: str) -> None:
    done = start(programs, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
