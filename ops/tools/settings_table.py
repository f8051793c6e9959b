"""`python -m quire.ops.tools.settings_table` writes the lists of settings in docs/settings.md from the code."""

from __future__ import annotations

import textwrap

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.tools.marked_tables import update_page
from quire.shared.config.settings import Option, options
from quire.worker.replay.commands import WorkerCommandSettings


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def tables() -> dict[str, str]:
    """Return the lists of settings by the name in their markers: one for each group of commands that share flags."""
    rows: dict[str, tuple[Option, dict[str, str]]] = {}
    for command, cls in (("serve", ServeSettings), ("gateway", GatewaySettings), ("worker", WorkerCommandSettings)):
        for item in options(cls):
            if item.variable not in ("", f"QUIRE_{item.flag.strip('-').replace('-', '_').upper()}"):
                raise ValueError(f"{item.flag} needs a note in docs/settings.md: its variable is {item.variable}")
            default = "" if item.default in ("", None) else f"`{item.format(item.default)}`"
            rows.setdefault(item.name, (item, {}))[1][command] = default
    groups: dict[str, list[str]] = {}
    for item, defaults in rows.values():
        if len({*defaults.values()}) == 1:
            shown = next(iter(defaults.values()))
        else:
            shown = ", ".join(f"{command} {default}" for command, default in defaults.items() if default)
        choices = f" One of {', '.join(map(str, item.choices))}." if item.choices else ""
        lines = groups.setdefault(", ".join(f"`quire {command}`" for command in defaults), [])
        default = f" ({shown})" if shown else ""
        only = "" if item.variable else " Only as a flag."
        lines.append(f"- `{item.flag}`{default}: {item.help}{choices}{only}")
    return {
        "settings": "\n\n".join(
            "\n".join([f"Of {commands}:", "", *(_wrapped(line) for line in lines)])
            for commands, lines in groups.items()
        )
        + "\n"
    }


if __name__ == "__main__":
    update_page("settings.md", tables())
