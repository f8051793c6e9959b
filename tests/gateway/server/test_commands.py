"""The commands of the gateway: the model's folder becomes absolute, and examples name the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.gateway.server import commands
from quire.gateway.settings import GatewaySettings
from quire.shared.command_line import CommandError


def test_the_gateway_gets_the_absolute_folder_of_the_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GatewaySettings] = []
    monkeypatch.setattr("quire.gateway.server.main.run", lambda settings: seen.append(settings) or 0)
    monkeypatch.chdir(tiny_model.parent)
    assert commands.run_gateway(GatewaySettings(model=f"./{tiny_model.name}"), {}) == 0
    assert [Path(settings.model) for settings in seen] == [tiny_model.resolve()]


def test_a_folder_without_a_model_is_refused_before_the_gateway_starts(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json is missing"):
        commands.run_gateway(GatewaySettings(model=str(tmp_path)), {})


@pytest.mark.parametrize("command", [commands.GATEWAY, commands.DEAD_LETTERS, commands.KEYS, commands.USAGE])
def test_each_example_begins_with_the_program(command: object) -> None:
    assert isinstance(command, type(commands.GATEWAY))
    assert command.examples
    assert all(example.startswith("{prog}") for example in command.examples)
