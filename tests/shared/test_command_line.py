"""The runner of commands: exit codes, and one line on standard error for each failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import pytest

from quire.shared.command_line import Command, CommandError, report_failures, run_command, run_script
from quire.shared.settings import SettingError, option


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: int = option(3, minimum=1, help="Size.")


def show(settings: Settings, environ: Mapping[str, str]) -> int:
    if settings.size == 13:
        raise CommandError("--size: 13 brings bad luck; give another")
    print(f"size {settings.size}")
    return 7 if settings.size == 7 else 0


COMMAND = Command("Show a size.", "Show a size, and no more.", ("{prog} --size 4",), Settings, show)


def failing(error: BaseException) -> Callable[[], NoReturn]:
    def run() -> NoReturn:
        raise error

    return run


def test_a_command_gets_its_settings_and_gives_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("try", COMMAND, ["--size", "4"], {}) == 0
    assert run_command("try", COMMAND, [], {"QUIRE_SIZE": "7"}) == 7
    assert capsys.readouterr().out == "size 4\nsize 7\n"


def test_help_calls_the_command_by_the_name_that_it_has_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("quire-try", COMMAND, ["--help"], {}) == 0
    out = capsys.readouterr().out
    assert "usage: quire-try [options]" in out
    assert "Show a size, and no more." in out
    assert out.endswith("examples:\n  quire-try --size 4\n")


def test_a_wrong_setting_is_2_and_a_failure_is_1_with_the_source_of_the_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command("try", COMMAND, ["--size", "0"], {}) == 2
    assert run_command("try", COMMAND, [], {"QUIRE_SIZE": "13"}) == 1
    wrong, failed = capsys.readouterr().err.splitlines()
    assert wrong.startswith("try: --size (QUIRE_SIZE): '0' from --size is too small")
    assert failed == ("try: --size: 13 brings bad luck; give another (--size came as QUIRE_SIZE from the environment)")


def test_variables_of_other_processes_are_refused_unless_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other:
        colour: str = option("", help="Colour.")

    environ = {"QUIRE_COLOUR": "red"}
    assert run_command("try", COMMAND, [], environ) == 2
    assert "QUIRE_COLOUR in the environment is not a setting" in capsys.readouterr().err
    assert run_command("try", COMMAND, [], environ, known=[Other]) == 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SettingError("no such\nsetting"), 2, "try: no such setting\n"),
        (CommandError("no room"), 1, "try: no room\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(0), 0, ""),
        (ConnectionError("nothing there"), 1, "try: nothing there\n"),
        (ModuleNotFoundError(name="torch"), 1, "try: the Python package torch is missing: `make setup` installs "),
        (ValueError("odd"), 1, "try: unexpected failure, ValueError: odd (at test_command_line.py:"),
    ],
)
def test_each_failure_has_its_exit_code_and_its_line(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failures("try", {}, failing(error)) == code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == bool(said)


def test_the_traceback_is_printed_if_the_log_level_is_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failures("try", {"QUIRE_LOG_LEVEL": "debug"}, failing(ValueError("odd"))) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_script_says_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quire-try", "--version"])
    monkeypatch.setattr("quire.shared.command_line.end_at_ctrl_c", lambda: None)
    assert run_script("quire-try", COMMAND) == 0
    assert capsys.readouterr().out.startswith("quire-try 0.")
