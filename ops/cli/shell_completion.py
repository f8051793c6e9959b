"""Completion for bash, zsh and fish, made from the declarations of the commands.

Each script is a table of what may follow: the commands, the flags of each, and the values of flags that have a few, or
that are files. The scripts start no process, so completion is instant.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.ops.cli.help_search import every_option
from quire.shared.config.command_line import Command, CommandGroup
from quire.shared.config.settings import Option

# Options whose values are places of files, by their metavar.
FILES = ("FILE", "DIR", "MODEL", "PATH")
HELP = "Show the help; --help=WORDS shows the flags that match."


@dataclass(slots=True)
class CompletionPlace:
    """What may follow some words. after: such as `quire keys create`. words: commands, each with its summary."""

    after: str
    words: dict[str, str] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)


def script(shell: str, commands: Mapping[str, Command[Any] | CommandGroup]) -> str:
    """Return the script for a shell."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(_places(commands)))


def _places(commands: Mapping[str, Command[Any] | CommandGroup]) -> Iterator[CompletionPlace]:
    yield CompletionPlace("quire", {name: command.summary for name, command in commands.items()})
    for name, command in commands.items():
        if isinstance(command, CommandGroup):
            inner = {word: subcommand.summary for word, subcommand in command.commands.items()}
            yield CompletionPlace(f"quire {name}", inner, every_option(command.commands[command.default]))
            for word, subcommand in command.commands.items():
                yield CompletionPlace(f"quire {name} {word}", {}, every_option(subcommand))
        else:
            yield CompletionPlace(f"quire {name}", {}, every_option(command))


def _first(place: CompletionPlace) -> tuple[list[str], bool]:
    """Return the words that may come first, and whether files may."""
    positional = next((item for item in place.options if item.positional), None)
    words = [*place.words, *(map(str, positional.choices) if positional else ())]
    return words, positional is not None and positional.metavar in FILES


def _values(item: Option) -> str:
    """Return the values of an option, separated by spaces; empty if they cannot be listed."""
    return " ".join(map(str, item.choices))


def _flags(place: CompletionPlace) -> list[str]:
    return [*(flag for item in place.options for flag in item.flags), "--help"]


def _bash(places: list[CompletionPlace]) -> str:
    cases = []
    for place in places:
        words, files = _first(place)
        values = [
            f"            {item.flag}) {_reply(_values(item), item.metavar in FILES)} ;;"
            for item in place.options
            if item.kind is not bool
        ]
        cases.append(
            "\n".join(
                [
                    f"    {shlex.quote(place.after)})",
                    '        case "$before" in',
                    *values,
                    f"            *) {_reply(' '.join(words), files, flags=' '.join(_flags(place)))} ;;",
                    "        esac ;;",
                ]
            )
        )
    names = "|".join(shlex.quote(place.after) for place in places[1:])
    return f"""\
# Completion of quire.
_quire_words() {{
    COMPREPLY=($(compgen -W "$1" -- "$word"))
}}
_quire_files() {{
    local IFS=$'\\n'
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen -f -- "$word"))
}}
_quire() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} place=quire next i
    COMPREPLY=()
    if [[ $word == = ]]; then
        word=
    elif [[ $before == = ]]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        next="$place ${{COMP_WORDS[i]}}"
        case "$next" in
            {names}) place=$next ;;
            *) break ;;
        esac
    done
    case "$place" in
{chr(10).join(cases)}
    esac
}}
complete -F _quire quire"""


def _reply(words: str, files: bool, flags: str = "") -> str:
    """Return the commands of bash that offer words, flags if the word begins with a dash, and files."""
    offered = f"_quire_words {shlex.quote(words)}" + ("; _quire_files" if files else "")
    if not flags:
        return offered
    return f"if [[ $word == -* ]]; then _quire_words {shlex.quote(flags)}; else {offered}; fi"


def _zsh(places: list[CompletionPlace]) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(places)}"


def _fish(places: list[CompletionPlace]) -> str:
    said = ["# Completion of quire for fish.", "complete -c quire -f"]
    groups = {place.after.split()[1] for place in places if len(place.after.split()) == 3}
    for place in places:
        words = place.after.split()[1:]
        here = " ".join(f"__fish_seen_subcommand_from {word}" for word in words[:1])
        if len(words) == 2:
            here += f"; and __fish_seen_subcommand_from {words[1]}"
        elif not words:
            here = "__fish_use_subcommand"
        elif words[0] in groups:
            here += f"; and not __fish_seen_subcommand_from {' '.join(place.words)}"
        head = f"complete -c quire -n {shlex.quote(here)}"
        said += [f"{head} -a {shlex.quote(word)} -d {shlex.quote(text)}" for word, text in place.words.items()]
        first, files = _first(place)
        if files:
            said.append(f"{head} -F")
        elif chosen := [word for word in first if word not in place.words]:
            said.append(f"{head} -a {shlex.quote(' '.join(chosen))}")
        for item in place.options:
            takes = "" if item.kind is bool else " -r -F" if item.metavar in FILES else " -x"
            values = f" -a {shlex.quote(_values(item))}" if item.choices else ""
            for flag in item.flags:
                said.append(f"{head} -l {flag[2:]} -d {shlex.quote(_sentence(item.help))}{takes}{values}")
    said.append(f"complete -c quire -l help -d {shlex.quote(HELP)}")
    return "\n".join(said)


def _sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".").partition("; ")[0]
