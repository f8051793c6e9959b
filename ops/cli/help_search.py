"""`quire COMMAND --help=WORDS`: the options whose flags or texts have these words, of one command or of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.shared.config.command_line import Command
from quire.shared.config.settings import Option, matching, options, render_option, wrap
from quire.worker.settings import WorkerSettings


def every_option(command: Command[Any]) -> list[Option]:
    """Return the options that a command accepts: those of `quire serve` include those of its services."""
    classes = [command.settings]
    if command.settings is ServeSettings:
        classes += [GatewaySettings, WorkerSettings]
    found: dict[str, Option] = {}
    for item in (item for cls in classes for item in options(cls)):
        found.setdefault(item.name, item)
    return list(found.values())


def print_matches(commands: Mapping[str, Command[Any]], words: Sequence[str], search: str) -> int:
    """Print the options that match, each once with its commands, of the command that `words` begin with.

    Raise SettingError if none matches.
    """
    place = next((name for name in (" ".join(words[:2]), *words[:1]) if _of(commands, name)), "")
    users: dict[tuple[str, str], tuple[Option, list[str]]] = {}
    for name, command in (_of(commands, place) if place else commands).items():
        for item in every_option(command):
            users.setdefault((item.flag, item.help), (item, []))[1].append(name)
    found = matching([item for item, _ in users.values()], search, f"quire {place}".rstrip())
    for item in found:
        names = users[item.flag, item.help][1]
        print(render_option(item))
        if names != [place]:
            print(wrap("Of " + ", ".join(f"quire {name}" for name in names) + ".", " " * 6))
    return 0


def _of(commands: Mapping[str, Command[Any]], place: str) -> dict[str, Command[Any]]:
    """Return the command of this name, or the commands of the group of this name."""
    return {name: command for name, command in commands.items() if f"{name} ".startswith(f"{place} ")}
