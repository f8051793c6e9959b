"""Ctrl-C while a command of `quire` starts ends it silently, at whatever moment it comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.shared.interrupts import EXIT_CODE
from tests.conftest import clean_environ

START_TIMEOUT_S = 60.0


def _heed_sigint() -> None:
    """Give SIGINT its default action in a new process. Shells ignore it for what a script starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: str, options: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *options, "-m", "quire", *arguments],
        env=clean_environ(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_sigint,
    )


def running_with(text: str) -> list[int]:
    """The processes that have `text` in their command line or environment, this one left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            said = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if text.encode() in said and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *(
            ("serve", module)
            for module in (
                "difflib",
                "quire.shared.settings",
                "quire.gateway.settings",
                "quire.worker.device.topology",
                "quire.ops.local.launcher",
            )
        ),
        *(("worker", module) for module in ("quire.shared.text.tokenizer", "numpy", "torch.nn.modules")),
        *(
            pytest.param("worker", module, marks=pytest.mark.slow)
            for module in ("torch.functional", "quire.worker.build")
        ),
        *(("gateway", module) for module in ("asyncio", "aiohttp.client", "quire.gateway.server.app")),
        *((command, "quire.shared.settings") for command in ("chat", "dead", "bench", "--help")),
    ],
)
def test_ctrl_c_in_the_middle_of_the_imports_ends_a_command_silently(
    command: str, module: str, tmp_path: Path, redis_url: str, tiny_model: Path
) -> None:
    """Python names each module on standard error once it is imported: the signal comes while the next ones are."""
    arguments = {
        "serve": [str(tiny_model), "--port", "0", "--state-dir", str(tmp_path)],
        "worker": [str(tiny_model), "--redis-url", redis_url],
        "gateway": [str(tiny_model), "--port", "0", "--redis-url", redis_url],
    }
    process = start(command, *arguments.get(command, []), options=("-X", "importtime"))
    assert process.stderr is not None
    line = re.compile(rf"import time:.*\| +{re.escape(module)}$")
    with process:
        assert any(line.match(said) for said in process.stderr), f"{module} is not imported"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=START_TIMEOUT_S)
    rest = [text for text in said.splitlines() if not text.startswith("import time:")]
    assert (process.returncode, rest) == (EXIT_CODE, [])


@pytest.mark.soak
def test_ctrl_c_at_any_moment_of_the_start_shows_no_traceback_and_leaves_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    state = tmp_path / "state"
    for delay_ms in range(0, 400, 12):
        process = start("serve", str(tiny_model), "--port", "0", "--state-dir", str(state), TEST_PLACE=str(tmp_path))
        time.sleep(delay_ms / 1000)  # the test tries different moments
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=START_TIMEOUT_S)
        # Until the handler is there, it is Python's own start that is interrupted, which reports that in its own way.
        if "/ops/" not in said or "interrupts" in said:
            said = re.sub(
                r"(?s)\A(Could not import runpy module\n)?(Fatal Python error|Traceback).*KeyboardInterrupt\n\Z",
                "",
                said,
            )
        assert "Traceback" not in said, f"after {delay_ms} ms"
        assert "Error" not in said, f"after {delay_ms} ms"
        assert process.returncode in (0, 1, EXIT_CODE, -signal.SIGINT)
        deadline = time.monotonic() + 10
        while (left := running_with(str(tmp_path))) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"after {delay_ms} ms"


def test_a_sigint_that_the_caller_ignores_stays_ignored() -> None:
    """Shells ignore SIGINT for commands that a script starts in the background."""
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "-", sys.executable, "-X", "importtime", "-m", "quire", "--help"]
    process = subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process:
        assert any("| quire.shared.settings" in re.sub(" +", " ", said) for said in process.stderr)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0
    assert "commands:" in out
