"""`python -m quire.ops.tools.responses_table` writes the table of parameters in docs/responses.md from the code."""

from __future__ import annotations

import re

from quire.gateway.api.responses.parameters import REFUSED, RESPONSES
from quire.ops.tools.marked_tables import update_page

# Parameters of other calls link to sections of their own page.
_LINK = re.compile(r"\[([^]]+)\]\(#(?!items|events-of-a-response)[^)]+\)")


def tables() -> dict[str, str]:
    """The tables by the name in their markers."""
    lines = ["| parameter | type and range | default | what |", "|---|---|---|---|"]
    for name, one in RESPONSES.items():
        default = f" {one.documented_default} " if one.documented_default else " "
        meaning = _LINK.sub(r"\1", one.help)
        lines.append(f"| `{name}` | {one.documented_kind} |{default}| {meaning} |")
    refused = ["| parameter | instead |", "|---|---|"]
    refused += [f"| `{name}` | {instead} |" for name, instead in REFUSED.items()]
    return {"parameters": "\n".join(lines) + "\n", "refused": "\n".join(refused) + "\n"}


if __name__ == "__main__":
    update_page("responses.md", tables())
