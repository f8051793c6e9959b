"""`python -m quire.ops.tools.parameters_table` writes the parameters in docs/ from their declarations."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from quire.gateway.api.embeddings import EMBEDDINGS
from quire.gateway.api.labels import NO_EFFECT
from quire.gateway.api.messages.parameters import COUNT_TOKENS, CREATE, REFUSED, WITHOUT_EFFECT
from quire.gateway.api.parameters import CHAT, COMPLETIONS, UNSUPPORTED
from quire.gateway.api.responses.parameters import REFUSED as REFUSED_RESPONSES
from quire.gateway.api.responses.parameters import RESPONSES
from quire.gateway.features.batches.batch_parameters import BATCHES
from quire.gateway.features.conversations.conversation_parameters import CREATE as NEW_CONVERSATIONS
from quire.gateway.features.rerank.score_parameters import RERANK, SCORE
from quire.gateway.features.rerank.score_parameters import UNSUPPORTED as RERANK_REFUSED
from quire.gateway.features.tokenization.token_requests import DETOKENIZE, TOKENIZE
from quire.ops.tools.marked_tables import update_page
from quire.shared.config.validators import OneOf
from quire.shared.protocol.sampling_params import Parameter

# Sections to which the texts of parameters link, by the page that has them. All other sections are in api/chat.md.
SECTIONS = {
    "deadlines-and-classes": "api/errors.md",
    "blocks": "api/messages.md",
    "tools-of-a-message": "api/messages.md",
    "cache-breakpoints": "api/messages.md",
    "items": "responses.md",
    "events-of-a-response": "responses.md",
    "conversations": "responses.md",
    "compaction": "responses.md",
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


def _kind(parameter: Parameter) -> str:
    """Return type and range of a parameter."""
    if parameter.kind:
        return parameter.kind
    if isinstance(parameter.read, OneOf):
        *first, last = (f"`{choice}`" for choice in parameter.read.choices)
        return f"{', '.join(first)} or {last}"
    return re.sub("^an? ", "", str(parameter.read))


def _item(name: str, of: str, parameter: Parameter) -> str:
    """Return the item of a list: name, the one call that has it ('': all), type and range, default, and meaning."""
    calls = f"{of}; " if of else ""
    default = parameter.documented_default
    shown = {"": "", "required": "; required"}.get(default, f"; default {default}")
    text = f"- `{name}` ({calls}{_kind(parameter)}{shown}): {parameter.help}"
    return text.replace("\\|", "|") + "\n"  # the texts are escaped for tables


def _also_in_chats(name: str, of: str, parameter: Parameter) -> str:
    """Return the item of a parameter, without its meaning if a chat has the same parameter."""
    item = _item(name, of, parameter)
    if name in CHAT and CHAT[name].help == parameter.help:
        item = item.replace(parameter.help, AS_IN_A_CHAT)
    return item


def _list(parameters: Mapping[str, Parameter]) -> str:
    return "".join(_item(name, "", parameter) for name, parameter in parameters.items())


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, "|---" * head.count(" | ") + "|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "".join(f"{line.replace('|  |', '| |')}\n" for line in lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + ".\n"


def _values(neutral: tuple[Any, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in neutral)


def _filled(text: str) -> str:
    """Return a text whose lines, except those of tables, have at most 128 characters."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("|"):
            indent = "  " if line.startswith("- ") else ""
            line = textwrap.fill(line, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _linked(text: str, page: str) -> str:
    """Return a text whose links to sections lead to the pages that have them."""

    def target(match: re.Match[str]) -> str:
        there = SECTIONS.get(match[1], "api/chat.md")
        path = "" if there == page else PurePosixPath(there).relative_to(PurePosixPath(page).parent)
        return f"({path}#{match[1]})"

    return re.sub(r"\(#([\w-]+)\)", target, text)


def _without(others: Mapping[str, Parameter], table: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters of a table that are not those of another one. A chat has its own `prediction`."""
    return {name: parameter for name, parameter in table.items() if parameter is not others.get(name)}


def tables() -> dict[str, dict[str, str]]:
    """Return the tables by the name of their page in docs/ and the name in their markers."""
    of_chats = {
        name: parameter
        for name, parameter in RESPONSES.items()
        if name in CHAT and _item(name, "", CHAT[name]) == _item(name, "", parameter)
    }
    pages = {
        "api/chat.md": {
            "parameters": _of_two("chat", _without(NO_EFFECT, CHAT), "completions", _without(NO_EFFECT, COMPLETIONS)),
            "no-effect": _table(
                "| parameter | type and range | why |",
                ((f"`{name}`", _kind(parameter), parameter.help) for name, parameter in NO_EFFECT.items()),
            ),
            "unsupported": _table(
                "| parameter | of | accepted values, without effect |",
                (
                    (f"`{name}`", "completions" if name in CHAT else "both", _values(neutral))
                    for name, neutral in UNSUPPORTED.items()
                ),
            ),
        },
        "api/messages.md": {
            "message-parameters": "".join(
                _also_in_chats(name, "" if name in COUNT_TOKENS else "messages", parameter)
                for name, parameter in CREATE.items()
            ),
            "message-no-effect": _list(WITHOUT_EFFECT),
            "message-unsupported": _table(
                "| parameter | accepted values, without effect |",
                ((f"`{name}`", _values(neutral)) for name, neutral in REFUSED.items()),
            ),
        },
        "api/embeddings.md": {
            "embedding parameters": "".join(
                _also_in_chats(name, "", parameter) for name, parameter in EMBEDDINGS.items()
            ),
            "token-parameters": _of_two("tokenize", TOKENIZE, "detokenize", DETOKENIZE),
        },
        "api/rerank.md": {
            "rerank-parameters": "".join(
                _also_in_chats(name, "" if parameter is SCORE.get(name) else "rerank", parameter)
                for name, parameter in RERANK.items()
            )
            + "".join(_item(name, "score", parameter) for name, parameter in _without(RERANK, SCORE).items()),
            "rerank-unsupported": _table(
                "| parameter | accepted values, without effect |",
                ((f"`{name}`", _values(neutral)) for name, neutral in RERANK_REFUSED.items()),
            ),
        },
        "responses.md": {
            "parameters": _list(_without(of_chats, RESPONSES)),
            "parameters-of-chats": _names(of_chats),
            "conversation-parameters": _list(NEW_CONVERSATIONS),
            "refused": _table(
                "| parameter | instead |", ((f"`{name}`", instead) for name, instead in REFUSED_RESPONSES.items())
            ),
        },
        "batches.md": {"parameters": _list(BATCHES)},
    }
    return {
        page: {name: _filled(_linked(table, page)) for name, table in named.items()} for page, named in pages.items()
    }


if __name__ == "__main__":
    for page, named in tables().items():
        update_page(page, named)
