"""The settings of the dead-letter command."""

from __future__ import annotations

import pytest

from quire.gateway.admin.dead_letter_settings import DeadLetterSettings
from quire.shared.settings import SettingError, load


def test_the_action_is_positional_and_lists_by_default() -> None:
    assert load(DeadLetterSettings, (), {}, prog="quire-dead").action == "list"
    settings = load(DeadLetterSettings, ("show", "--entry", "1-0"), {}, prog="quire-dead")
    assert (settings.action, settings.entry) == ("show", "1-0")


def test_an_unknown_action_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"list, show, retry or drop"):
        load(DeadLetterSettings, ("remove",), {}, prog="quire-dead")
