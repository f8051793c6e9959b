"""Each setting of each command: a wrong value is told with its name, the value, where it came from, and a remedy."""

from __future__ import annotations

import pytest

from quire.ops.cli.commands import COMMANDS
from quire.ops.cli.settings import ALL_SETTINGS
from quire.shared.settings import Option, SettingError, load, options


def wrong_value(item: Option) -> str | None:
    """A text that the option cannot take; None where it takes any."""
    if item.choices:
        return "no-such-choice" if item.kind is str else "7"
    return None if item.kind is str else "x"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_value_is_told_in_full(name: str) -> None:
    cls = COMMANDS[name].settings
    for item in options(cls):
        text = wrong_value(item)
        if text is None:
            continue
        sources = [([], {item.variable: text}, item.variable)]
        if item.kind is not bool:
            sources.append(([f"{item.flag}={text}"], {}, item.flag))
        for argv, environ, source in sources:
            with pytest.raises(SettingError) as caught:
                load(cls, argv, environ, prog=f"quire {name}", known=ALL_SETTINGS)
            message = str(caught.value)
            assert message.startswith(f"{item.flag} ({item.variable}): {text!r} from {source} "), message
            assert "; give " in message
            assert "\n" not in message
