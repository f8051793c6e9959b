"""`python -m quire.ops.tools.settings_table` writes the table of settings in docs/settings.md from the code."""

from __future__ import annotations

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.tools.marked_tables import update_page
from quire.shared.settings import Option, options
from quire.worker.settings import WorkerSettings


def tables() -> dict[str, str]:
    """The table of settings, by the name in its markers: flag, variable, commands, default and meaning of each."""
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
    return {"settings": "\n".join(lines) + "\n"}


if __name__ == "__main__":
    update_page("settings.md", tables())
