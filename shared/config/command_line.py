"""Runs one command: reads its settings, runs it, and prints each failure as one line with its remedy.

`quire`, `quire-gateway`, `quire-worker` and `quire-dead` share this module. Exit codes: 0 for success, 1 for a failure,
2 for a wrong setting, 130 for Ctrl-C.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.shared.config.settings import SettingError, load, with_sources, wrap
from quire.shared.process.interrupts import EXIT_CODE, end_at_ctrl_c
from quire.shared.process.version import install_command, installed_version

Settings = TypeVar("Settings")


class CommandError(Exception):
    """A failure that the user can mend. The text is one line with the fault, its place and the remedy."""

    exit_code = 1


@dataclass(frozen=True)
class Command(Generic[Settings]):
    """One command.

    examples: command lines with `{prog}` in place of the command's name.
    run: gets the settings and the environment, and returns the exit code. `run` imports its modules when it is called,
    so that `--help` loads neither torch nor aiohttp.
    """

    summary: str
    description: str
    examples: tuple[str, ...]
    settings: type[Settings]
    run: Callable[[Settings, Mapping[str, str]], int]


@dataclass(frozen=True)
class CommandGroup:
    """A command of several commands, each with flags of its own, such as `quire keys create`.

    default: the command that runs if none is named. examples: as those of a `Command`.
    """

    summary: str
    description: str
    examples: tuple[str, ...]
    commands: Mapping[str, Command[Any]]
    default: str

    def help(self, prog: str) -> str:
        """Return the text of `--help`."""
        commands = table({name: command.summary for name, command in self.commands.items()})
        notes = (
            f"`{prog} COMMAND --help` shows the flags and examples of a command. Without a command, `{prog}` is "
            f"`{prog} {self.default}`."
        )
        examples = "\n".join("  " + example.replace("{prog}", prog) for example in self.examples)
        return (
            f"usage: {prog} [COMMAND] [options]\n\n{wrap(self.description)}\n\ncommands:\n{commands}\n\n"
            f"{wrap(notes)}\n\nexamples:\n{examples}"
        )

    def find(self, prog: str, arguments: Sequence[str]) -> tuple[str, Command[Any], Sequence[str]]:
        """Return the command that the arguments name, its full name, and its own arguments. Raise SettingError."""
        if not arguments or arguments[0].startswith("-"):
            return f"{prog} {self.default}", self.commands[self.default], arguments
        name = arguments[0]
        if name in self.commands:
            return f"{prog} {name}", self.commands[name], arguments[1:]
        nearest = difflib.get_close_matches(name, self.commands, n=1)
        remedy = f"did you mean `{prog} {nearest[0]}`?" if nearest else "give one of " + ", ".join(self.commands)
        raise SettingError(f"there is no command {name!r}: {remedy}")


def run_command(
    prog: str,
    command: Command[Any] | CommandGroup,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    known: Iterable[type] = (),
) -> int:
    """Run `command` with `arguments`, and return the exit code.

    prog: the command's name in help and errors. known: settings classes of other processes, whose variables the
    environment may hold.
    """
    if isinstance(command, CommandGroup):
        return _run_group(prog, command, arguments, environ, known)

    def run() -> int:
        examples = [example.replace("{prog}", prog) for example in command.examples]
        settings = load(
            command.settings,
            arguments,
            environ,
            prog=prog,
            description=command.description,
            examples=examples,
            known=known,
        )
        try:
            return command.run(settings, environ)
        except (SettingError, CommandError) as error:
            error.args = (with_sources(str(error), settings, environ),)
            raise

    return report_failures(prog, environ, run)


def _run_group(
    prog: str, group: CommandGroup, arguments: Sequence[str], environ: Mapping[str, str], known: Iterable[type]
) -> int:
    def run() -> int:
        if arguments and arguments[0] in ("-h", "--help", "help"):
            print(group.help(prog))
            return 0
        name, command, rest = group.find(prog, arguments)
        return run_command(name, command, rest, environ, known)

    return report_failures(prog, environ, run)


def table(rows: Mapping[str, str]) -> str:
    """Return lines of names and texts, in two columns as wide as the terminal."""
    width = max(map(len, rows))
    return "\n".join(wrap(text, " " * (width + 4), f"  {name:<{width}}  ") for name, text in rows.items())


def run_script(prog: str, command: Command[Any] | CommandGroup, known: Iterable[type] = ()) -> int:
    """Run a console script that is one command, with the process's arguments and environment."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] in (["-V"], ["--version"]):
            print(f"{prog} {installed_version('0 (not installed)')}")
            return 0
        return run_command(prog, command, arguments, dict(os.environ), known)
    finally:
        end_at_ctrl_c()


def report_failures(prog: str, environ: Mapping[str, str], run: Callable[[], int]) -> int:
    """Return the exit code of `run`, or of the exception that it raised, after one line on standard error."""
    try:
        code = _exit_code(prog, environ, run)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `quire --help | head`: the reader has ended, and the rest of the buffer is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _exit_code(prog: str, environ: Mapping[str, str], run: Callable[[], int]) -> int:
    try:
        return run()
    except SettingError as error:
        return _fail(prog, error, 2)
    except CommandError as error:
        return _fail(prog, error, error.exit_code)
    except KeyboardInterrupt:
        return EXIT_CODE
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except BrokenPipeError:
        raise
    except Exception as error:
        if environ.get("QUIRE_LOG_LEVEL") == "debug":
            traceback.print_exc()
        return _fail(prog, _explain(error), 1)


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name} is missing: `{install_command()}` installs everything"
    if isinstance(error, ConnectionError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(where.filename)}:{where.lineno}"
    detail = f"{type(error).__name__}: {error} (at {place}; QUIRE_LOG_LEVEL=debug prints the traceback)"
    return f"unexpected failure, {detail}"


def _fail(prog: str, error: object, code: int) -> int:
    print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
    return code
