"""Prints `.env.example`: every setting as a variable, with its default and its help.

A test checks that the file is up to date.

python -m quire.ops.tools.env_example > .env.example
"""

from __future__ import annotations

import textwrap

from quire.ops.cli.commands import single_commands
from quire.ops.tools.compose import VARIABLES
from quire.shared.config.settings import Option, options

HEADER = """\
# Every setting of Quire, with its default. `docker compose` reads a copy of this file named .env; `quire` reads the
# environment. A flag beats a variable: QUIRE_MAX_MODEL_LEN is --max-model-len. An empty variable counts as not set.
# Made by `python -m quire.ops.tools.env_example > .env.example`.
"""


def render() -> str:
    """Return the text of the file. Settings that several commands share come first."""
    users: dict[str, list[str]] = {}
    first: dict[str, Option] = {}
    for name, command in single_commands().items():
        for item in options(command.settings):
            if item.variable and (word := name.split()[0]) not in users.setdefault(item.variable, []):
                users[item.variable].append(word)
            first.setdefault(item.variable, item)
    order = list(dict.fromkeys(map(tuple, users.values())))
    parts: list[str] = [HEADER]
    section: tuple[str, ...] = ()
    for variable, names in sorted(users.items(), key=lambda entry: (-len(entry[1]), order.index(tuple(entry[1])))):
        if tuple(names) != section:
            section = tuple(names)
            parts.append(f"\n# --- {', '.join(f'quire {name}' for name in names)} ---\n")
        item = first[variable]
        notes = item.help
        if item.choices:
            notes += f" One of {', '.join(map(str, item.choices))}."
        parts += [f"# {line}" for line in textwrap.wrap(notes, 110)]
        parts.append(f"#{variable}={item.format(item.default)}\n")
    parts.append("\n# --- docker compose ---\n")
    for entry in VARIABLES:
        parts += [f"# {line}" for line in textwrap.wrap(entry.help, 110)]
        parts.append(f"#{entry.name}={entry.default}\n")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    print(render(), end="")
