"""The settings of the command about parked requests."""

from __future__ import annotations

import pytest

from quire.gateway.admin.parking_settings import ParkingSettings
from quire.shared.keys import PARKING_S
from quire.shared.settings import SettingError, load


def test_without_an_action_the_command_lists() -> None:
    settings = load(ParkingSettings, (), {}, prog="quire-parking")
    assert (settings.action, settings.id, settings.worker, settings.retention_s) == ("list", "", "", PARKING_S)


def test_an_action_has_its_request_or_worker() -> None:
    settings = load(ParkingSettings, ("park", "--worker", "gpu-7", "--retention-s", "60"), {}, prog="quire-parking")
    assert (settings.action, settings.worker, settings.retention_s) == ("park", "gpu-7", 60)
    assert load(ParkingSettings, ("unpark", "--id", "a"), {}, prog="quire-parking").id == "a"


def test_other_actions_are_refused() -> None:
    with pytest.raises(SettingError, match="give list, park or unpark"):
        load(ParkingSettings, ("drop",), {}, prog="quire-parking")
