"""The command `quire` as a process, and the one line in which it refuses something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import clean_environ


def quire(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", *arguments],
        env=clean_environ(**environ),
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


def refusal(code: int, *arguments: str, cwd: Path | None = None, **environ: str) -> str:
    done = quire(*arguments, cwd=cwd, **environ)
    lines = done.stderr.splitlines()
    assert done.returncode == code, done.stderr
    assert lines[-1].startswith("quire"), done.stderr
    assert "Traceback" not in done.stderr
    return lines[-1]
