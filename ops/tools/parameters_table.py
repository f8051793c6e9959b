"""`python -m quire.ops.tools.parameters_table` writes the table of parameters in docs/api.md from the code."""

from __future__ import annotations

from quire.gateway.api.parameters import CHAT, COMPLETIONS
from quire.ops.paths import PROJECT_ROOT
from quire.shared.sampling_params import Parameter

BEGIN, END = "<!-- parameters -->\n", "<!-- /parameters -->\n"


def table() -> str:
    """One row per parameter: name, which calls have it, type and range, default, meaning."""
    lines = ["| parameter | of | type and range | default | what |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(["model", "messages", "prompt", *CHAT, *COMPLETIONS]):
        chat, completions = CHAT.get(name), COMPLETIONS.get(name)
        if chat is completions and chat:
            lines.append(_row(name, "both", chat))
        else:
            lines += [_row(name, of, one) for of, one in (("chat", chat), ("completions", completions)) if one]
    return "\n".join(lines) + "\n"


def _row(name: str, of: str, parameter: Parameter) -> str:
    default = f" {parameter.documented_default} " if parameter.documented_default else " "
    return f"| `{name}` | {of} | {parameter.documented_kind} |{default}| {parameter.help} |"


def with_table(text: str) -> str:
    """`text` with the table between its markers brought up to date."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    page = PROJECT_ROOT / "docs" / "api.md"
    before = page.read_text()
    page.write_text(with_table(before))
    print("docs/api.md: " + ("unchanged" if page.read_text() == before else "parameters brought up to date"))
