"""`python -m quire.ops.tools.settings_table` writes the table of settings in docs/settings.md from the code."""

from __future__ import annotations

import sys

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.paths import PROJECT_ROOT
from quire.shared.settings import Option, options
from quire.worker.settings import WorkerSettings

BEGIN, END = "<!-- settings -->\n", "<!-- /settings -->\n"


def table() -> str:
    """The table: flag, variable, commands, default and meaning of each setting."""
    rows: dict[str, tuple[Option, dict[str, str]]] = {}
    for command, cls in (("serve", ServeSettings), ("gateway", GatewaySettings), ("worker", WorkerSettings)):
        for item in options(cls):
            default = "" if item.default in ("", None) else f"`{item.format(item.default)}`"
            rows.setdefault(item.name, (item, {}))[1][command] = default
    lines = ["| flag | environment | of | default | what |", "|---|---|---|---|---|"]
    for item, defaults in rows.values():
        if len({*defaults.values()}) == 1:
            shown = next(iter(defaults.values()))
        else:
            shown = ", ".join(f"{command} {default}" for command, default in defaults.items() if default)
        choices = f" One of {', '.join(map(str, item.choices))}." if item.choices else ""
        lines.append(f"| `{item.flag}` | `{item.variable}` | {', '.join(defaults)} | {shown} | {item.help}{choices} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """`text` with the current table between its markers."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    page = PROJECT_ROOT / "docs" / "settings.md"
    before = page.read_text()
    page.write_text(with_table(before))
    print("docs/settings.md: " + ("unchanged" if page.read_text() == before else "settings brought up to date"))
    sys.exit(0)
