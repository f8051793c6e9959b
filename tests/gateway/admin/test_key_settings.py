"""The settings of `quire keys`."""

from __future__ import annotations

import pytest

from quire.gateway.admin.key_settings import KeySettings, UsageSettings
from quire.shared.settings import SettingError, load


def test_a_limit_that_is_not_given_is_none() -> None:
    settings = load(KeySettings, ("limit", "--id", "a", "--max-tokens", "0"), {}, prog="quire-keys")
    assert (settings.action, settings.max_tokens, settings.tokens_per_day) == ("limit", 0, None)
    assert load(UsageSettings, (), {}, prog="quire-usage").action == "usage"


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(SettingError):
        load(KeySettings, ("remove",), {}, prog="quire-keys")
