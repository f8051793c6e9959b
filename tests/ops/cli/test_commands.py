"""`quire`: quick, with examples in every help, one line with a remedy for every mistake, and silent at Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.ops.cli.commands import COMMANDS, single_commands
from quire.ops.cli.main import main
from quire.ops.local.ports import free_port
from quire.shared.config.settings import options
from quire.shared.process.interrupts import EXIT_CODE
from tests.conftest import clean_environ
from tests.support.commands import quire, refusal

# --- commands ---------------------------------------------------------------------------------------------------------
# `quire`: quick, with examples in every help, and one line with a remedy for every mistake.


def test_help_lists_the_commands_and_has_examples() -> None:
    done = quire("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", single_commands())
def test_each_command_has_help_with_examples_that_call_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"], {}) == 0
    said = capsys.readouterr().out
    assert f"usage: quire {name}" in said
    assert f"quire {name}" in said.partition("examples:")[2]
    variables = [item.variable for item in options(single_commands()[name].settings) if item.variable]
    assert all(variable in said for variable in variables)


def test_help_loads_neither_torch_nor_aiohttp() -> None:
    program = (
        "import sys; from quire.ops.cli.main import main; main(['--help']); main(['--version'])\n"
        f"for name in {[name for name in COMMANDS if name != 'keys']}:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'aiohttp', 'redis', 'transformers', 'rich'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# They serve, hold a screen, or print a script.
WITHOUT_RESULTS = {"models add", "models remove", "serve", "gateway", "worker", "completion"}


def test_each_command_that_prints_a_result_prints_it_as_json_too() -> None:
    commands = {name: options(command.settings) for name, command in single_commands().items()}
    lacking = {name for name, items in commands.items() if "json" not in {item.name for item in items}}
    assert lacking == WITHOUT_RESULTS


def test_help_finds_flags_by_words_of_one_command_or_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=kv cache type"], {}) == 0
    said = capsys.readouterr().out
    assert "  --kv-cache-dtype auto|" in said, "a flag of the worker, which `quire serve` accepts"
    assert "--port" not in said
    assert main(["--help=QUIRE_ORPHAN"], {}) == 0
    said = capsys.readouterr().out
    assert re.findall("  --[a-z-]+", said) == ["  --orphan-s"]
    assert "Of quire serve, quire gateway, quire worker" in " ".join(said.split()) or "Of quire serve" in said
    assert main(["keys", "--help=grace"], {}) == 0
    assert "Of quire keys rotate." in capsys.readouterr().out
    assert refusal(2, "worker", "--help=nonsense").endswith(
        "no flag matches 'nonsense': `quire worker --help` lists all"
    )
    assert main(["chat", "--help"], {}) == 0
    assert "examples:" in capsys.readouterr().out


def test_no_command_shows_the_help_and_fails() -> None:
    done = quire()
    assert done.returncode == 2
    assert "commands:" in done.stdout


def test_a_misspelt_command_and_flag_and_variable() -> None:
    assert refusal(2, "serv") == "quire: there is no command 'serv': did you mean `quire serve`?"
    assert refusal(2, "serve", "--prot", "1").endswith("unknown flag --prot: did you mean --port?")
    assert refusal(2, "serve", "--block-sise", "16").endswith("did you mean --block-size?")
    assert "did you mean QUIRE_MAX_NUM_SEQS?" in refusal(2, "serve", QUIRE_MAX_NUM_SEQ="1")
    assert "did you mean QUIRE_STATE_DIR?" in refusal(2, "worker", QUIRE_STATEDIR="x")


def test_wrong_values_for_the_services_are_found_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    arguments = ("serve", str(tiny_model), "--port", "0", "--state-dir", str(tmp_path))
    assert "from QUIRE_BLOCK_SIZE is not" in refusal(2, *arguments, QUIRE_BLOCK_SIZE="17")
    assert "--served-model-name" in refusal(1, *arguments, "--served-model-name", "a b")
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_a_missing_model_folder(tmp_path: Path) -> None:
    assert f"model: there is none at {tmp_path}/nope; give a folder" in refusal(1, "serve", f"{tmp_path}/nope")
    assert f"model: there is none at {tmp_path}/nope;" in refusal(1, "serve", "./nope", cwd=tmp_path)
    (tmp_path / "models").mkdir()
    assert f"model: there is none at {tmp_path}/models/x;" in refusal(1, "serve", "models/x", cwd=tmp_path)


def test_a_port_in_use_names_one_that_is_free(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(1, "serve", str(tiny_model), "--port", str(port), "--state-dir", str(tmp_path))
    assert f"port {port} on 127.0.0.1: Address already in use; pass --port " in line


def test_an_address_of_another_machine(tmp_path: Path, tiny_model: Path) -> None:
    line = refusal(1, "serve", str(tiny_model), "--host", "192.0.2.1", "--port", "8000", "--state-dir", str(tmp_path))
    assert "cannot listen on 192.0.2.1: Cannot assign requested address; pass --host 127.0.0.1" in line


def test_no_redis_at_the_url(tmp_path: Path, tiny_model: Path) -> None:
    url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
    arguments = ("serve", str(tiny_model), "--port", "0", "--state-dir", str(tmp_path))
    line = refusal(1, *arguments, "--redis-url", url)
    assert "no Redis at redis://user:***@127.0.0.1" in line
    assert "secret" not in line
    assert "--redis-url" in line
    assert "Give --redis-url" in refusal(1, *arguments, "--redis-url", "http://127.0.0.1")


@pytest.mark.slow
def test_services_without_redis(tiny_model: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert "no Redis at" in refusal(1, "gateway", str(tiny_model), "--redis-url", url, "--port", "0")
    assert "no Redis at" in refusal(1, "worker", str(tiny_model), "--redis-url", url)


def test_a_state_folder_that_cannot_be_written(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").touch()
    line = refusal(1, "serve", str(tiny_model), "--port", "0", "--state-dir", str(tmp_path / "file" / "state"))
    assert f"cannot write to the state folder {tmp_path}/file/state: Not a directory; pass --state-dir" in line


def test_output_may_be_cut_off() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--help"],
        env=clean_environ(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""


# --- main -------------------------------------------------------------------------------------------------------------
# Ctrl-C while a command of `quire` starts ends it silently, at whatever moment it comes.


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "module"),
    [
        *(("serve", module) for module in ("difflib", "quire.ops.local.launcher")),
        *(("worker", module) for module in ("quire.shared.text.tokenizer", "quire.worker.build")),
        *(("gateway", module) for module in ("asyncio", "quire.gateway.server.app")),
        *((command, "quire.shared.config.settings") for command in ("chat", "--help")),
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
        deadline = time.monotonic() + 60
        while (left := running_with(str(tmp_path))) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"after {delay_ms} ms"


def test_a_sigint_that_the_caller_ignores_stays_ignored() -> None:
    """Shells ignore SIGINT for commands that a script starts in the background."""
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "-", sys.executable, "-X", "importtime", "-m", "quire", "--help"]
    process = subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process:
        assert any("| quire.shared.config.settings" in re.sub(" +", " ", said) for said in process.stderr)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0
    assert "commands:" in out
