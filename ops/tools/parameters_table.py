"""`python -m quire.ops.tools.parameters_table` writes the parameters in docs/api/ from the code."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from quire.gateway.api.embeddings import EMBEDDINGS
from quire.gateway.api.labels import NO_EFFECT
from quire.gateway.api.messages.parameters import COUNT_TOKENS, CREATE
from quire.gateway.api.parameters import CHAT, COMPLETIONS
from quire.gateway.features.tokenization.token_requests import DETOKENIZE, TOKENIZE
from quire.ops.tools.marked_tables import update_page
from quire.shared.protocol.sampling_params import Parameter

# Sections to which the texts of parameters link, by the page that has them. All other sections are in chat.md.
SECTIONS = {
    "deadlines-and-classes": "errors.md",
    "blocks": "messages.md",
    "tools-of-a-message": "messages.md",
}
AS_IN_A_CHAT = "as in a chat"


def _of_two(
    first: str, first_parameters: Mapping[str, Parameter], second: str, second_parameters: Mapping[str, Parameter]
) -> str:
    """Return one item per parameter of two calls."""
    items = []
    for name in dict.fromkeys(["model", "messages", "prompt", *first_parameters, *second_parameters]):
        entries = [
            (of, table[name]) for of, table in ((first, first_parameters), (second, second_parameters)) if name in table
        ]
        if len(entries) == 2 and entries[0][1] is entries[1][1]:
            entries = [("", entries[0][1])]
        items += [_item(name, of, parameter) for of, parameter in entries]
    return "".join(items)


def _item(name: str, of: str, parameter: Parameter) -> str:
    """Return the item of a list: name, the one call that has it ('': all), type and range, default, and meaning."""
    calls = f"{of}; " if of else ""
    default = parameter.documented_default
    shown = {"": "", "required": "; required"}.get(default, f"; default {default}")
    text = f"- `{name}` ({calls}{parameter.documented_kind}{shown}): {parameter.help}"
    return text.replace("\\|", "|") + "\n"  # the texts are escaped for tables


def _also_in_chats(name: str, of: str, parameter: Parameter) -> str:
    """Return the item of a parameter, without its meaning if a chat has the same parameter."""
    item = _item(name, of, parameter)
    if name in CHAT and CHAT[name].help == parameter.help:
        item = item.replace(parameter.help, AS_IN_A_CHAT)
    return item


def _filled(text: str) -> str:
    """Return a text whose list items have lines of at most 128 characters."""
    lines = []
    for line in text.splitlines():
        if line.startswith("- "):
            line = textwrap.fill(line, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _linked(table: str, page: str) -> str:
    """Return a table whose links to sections lead to the pages that have them."""

    def target(match: re.Match[str]) -> str:
        there = SECTIONS.get(match[1], "chat.md")
        return f"(#{match[1]})" if there == page else f"({there}#{match[1]})"

    return re.sub(r"\(#([\w-]+)\)", target, table)


def _without(names: Mapping[str, Parameter], table: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in table.items() if name not in names}


def tables() -> dict[str, dict[str, str]]:
    """Return the tables by the name of their page in docs/api/ and the name in their markers."""
    no_effect = "".join(
        f"| `{name}` | {parameter.documented_kind} | {parameter.help} |\n" for name, parameter in NO_EFFECT.items()
    )
    pages = {
        "chat.md": {
            "parameters": _of_two("chat", _without(NO_EFFECT, CHAT), "completions", _without(NO_EFFECT, COMPLETIONS)),
            "no-effect": f"| parameter | type and range | why |\n|---|---|---|\n{no_effect}",
        },
        "messages.md": {
            "message-parameters": "".join(
                _also_in_chats(name, "" if name in COUNT_TOKENS else "messages", parameter)
                for name, parameter in CREATE.items()
            ),
        },
        "embeddings.md": {
            "embedding parameters": "".join(
                _also_in_chats(name, "", parameter) for name, parameter in EMBEDDINGS.items()
            ),
            "token-parameters": _of_two("tokenize", TOKENIZE, "detokenize", DETOKENIZE),
        },
    }
    return {
        page: {name: _filled(_linked(table, page)) for name, table in named.items()} for page, named in pages.items()
    }


if __name__ == "__main__":
    for page, named in tables().items():
        update_page(f"api/{page}", named)
