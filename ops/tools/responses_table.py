"""`python -m quire.ops.tools.responses_table` writes the parameters in docs/responses.md from the code."""

from __future__ import annotations

import re
import textwrap
from operator import attrgetter

from quire.gateway.api.parameters import CHAT
from quire.gateway.api.responses.parameters import REFUSED, RESPONSES
from quire.ops.tools.marked_tables import update_page

# Parameters of other calls link to sections of their own page.
_LINK = re.compile(r"\[([^]]+)\]\(#(?!items|events-of-a-response)[^)]+\)")
_shown = attrgetter("documented_kind", "documented_default", "help")


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def tables() -> dict[str, str]:
    """Return the tables by the name in their markers. Parameters of chats are only named."""
    shared = [name for name, parameter in RESPONSES.items() if name in CHAT and _shown(CHAT[name]) == _shown(parameter)]
    lines = []
    for name, parameter in RESPONSES.items():
        if name not in shared:
            meaning = _LINK.sub(r"\1", parameter.help)
            default = (
                f"; default {parameter.documented_default}"
                if parameter.documented_default not in ("", "required")
                else ""
            )
            lines.append(_filled(f"- `{name}` ({parameter.documented_kind}{default}): {meaning}", "  "))
    refused = ["| parameter | instead |", "|---|---|"]
    refused += [f"| `{name}` | {instead} |" for name, instead in REFUSED.items()]
    return {
        "parameters": "\n".join(lines) + "\n",
        "parameters-of-chats": _filled(", ".join(f"`{name}`" for name in shared) + ".") + "\n",
        "refused": "\n".join(refused) + "\n",
    }


if __name__ == "__main__":
    update_page("responses.md", tables())
