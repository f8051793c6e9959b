"""`quire completion`: real shells complete commands, flags and values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.ops.cli.commands import COMMANDS, single_commands
from quire.ops.cli.help_search import every_option
from quire.ops.cli.shell_completion import script
from tests.support.terminal import Terminal, terminal

pytestmark = pytest.mark.slow


def shell(name: str) -> str:
    """Return the path of a shell, or skip the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    return path


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name in ("bash", "zsh", "fish"):
        (tmp_path / f"quire.{name}").write_text(script(name, COMMANDS))
    (tmp_path / "model").mkdir()
    return tmp_path


# What is typed before Tab, and what the shell makes of it.
TYPED = {
    "quire ser": "quire serve ",
    "quire serve --max-num-b": "quire serve --max-num-batched-tokens",
    "quire keys crea": "quire keys create ",
    "quire keys create --tokens-per-min": "quire keys create --tokens-per-minute",
    "quire serve --dtype bfl": "quire serve --dtype bfloat16",
    "quire parking unp": "quire parking unpark",
    "quire worker mod": "quire worker model/",
    "quire completion fi": "quire completion fish",
}


def check(running: Terminal) -> None:
    """Type each line and Tab, and wait for what must follow."""
    for typed, completed in TYPED.items():
        running.type(typed)
        running.wait_for(typed[-4:])
        running.type("\t")
        # Some shells write the rest, others move the cursor and write the word again.
        running.wait_for(completed[len(typed) :].rstrip(" /"))
        running.type("\x15")


def test_bash(scripts: Path) -> None:
    with terminal([shell("bash"), "--norc", "--noprofile", "-i"], HISTFILE="", PS1="$ ") as running:
        running.type(f"cd {scripts}; bind 'set enable-bracketed-paste off'; source quire.bash; echo rea''dy\n")
        running.wait_for("ready")
        check(running)


def test_bash_lists_all_flags_of_every_command(scripts: Path) -> None:
    lines = [f"source {scripts}/quire.bash"]
    for name in single_commands():
        words = ["quire", *name.split(), "--"]
        lines.append(
            f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}; _quire; echo {name}: ${{COMPREPLY[@]}}"
        )
    done = subprocess.run([shell("bash"), "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    offered = dict(line.split(": ") for line in done.stdout.splitlines())
    for name, command in single_commands().items():
        assert set(offered[name].split()) == {
            *(flag for item in every_option(command) for flag in item.flags),
            "--help",
        }


def test_bash_completes_a_value_after_an_equals_sign(scripts: Path) -> None:
    line = "COMP_WORDS=(quire serve --dtype = bf) COMP_CWORD=4; _quire; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        [shell("bash"), "-c", f"source {scripts}/quire.bash; {line}"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("bfloat16\n", "")


def test_bash_completes_places_of_files_with_spaces(scripts: Path) -> None:
    (scripts / "my model").mkdir()
    line = "COMP_WORDS=(quire serve my) COMP_CWORD=2; _quire; echo ${#COMPREPLY[@]} ${COMPREPLY[0]}"
    command = [shell("bash"), "-c", f"source quire.bash; {line}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=scripts).stdout == "1 my model\n"


def test_zsh(scripts: Path) -> None:
    with terminal([shell("zsh"), "-f", "-i"], PS1="$ ") as running:
        running.type(f"cd {scripts}; autoload -U compinit; compinit -u -D; source quire.zsh; echo rea''dy\n")
        running.wait_for("ready")
        check(running)


def test_fish(scripts: Path) -> None:
    for typed, completed in TYPED.items():
        done = subprocess.run(
            [shell("fish"), "--no-config", "-c", f"source {scripts}/quire.fish; complete -C '{typed}'"],
            capture_output=True,
            text=True,
            cwd=scripts,
            check=True,
        )
        [word] = [line.split("\t")[0].replace("\\", "") for line in done.stdout.splitlines()]
        assert completed.replace("\\", "").strip().endswith(word), typed
        assert len(word) > len(typed.split()[-1])
