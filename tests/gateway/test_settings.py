"""The settings of a gateway: help texts that stand alone, and the name under which clients know the model."""

from __future__ import annotations

import re

import pytest

from quire.gateway.settings import GatewaySettings
from quire.shared.model.naming import InvalidModelName
from quire.shared.settings import options


def test_every_help_text_stands_alone() -> None:
    helps = {item.name: item.help for item in options(GatewaySettings)}
    assert len(set(helps.values())) == len(helps)
    for name, text in helps.items():
        assert text.endswith("."), name
        assert not re.match(r"(The same|Of (these|them)|They|It|Th[eo]se|Their|What|Who|Whether|How)\b", text), name


def test_the_name_is_that_of_the_folder_unless_another_is_given() -> None:
    assert GatewaySettings(model="models/demo").name == "demo"
    assert GatewaySettings(model="models/demo", served_model_name="other").name == "other"
    with pytest.raises(InvalidModelName):
        _ = GatewaySettings(model="models/demo", served_model_name="{lane}").name
