"""`quire dead` over several lanes."""

from __future__ import annotations

import pytest
from redis import Redis

from ops.dead import dead
from ops.errors import CommandError
from ops.settings import DeadSettings
from shared.keys import LaneKeys

FIELDS = {"id": "r", "class": "standard", "worker": "w", "emitted": "3", "body": "x", "about": ""}


@pytest.fixture
def lanes(redis_url: str) -> str:
    """Two lanes with an entry of the same id, and one more in the second."""
    with Redis.from_url(redis_url) as client:
        for lane in ("one", "two/b"):
            client.xadd(LaneKeys(lane).dead, dict(FIELDS), id="5-0")
        client.xadd(LaneKeys("two/b").dead, dict(FIELDS), id="6-0")
    return redis_url


def settings(redis_url: str, action: str, entry: str = "", lane: str = "") -> DeadSettings:
    return DeadSettings(action=action, entry=entry, redis_url=redis_url, served_model_name=lane)


def test_all_lanes_are_listed_unless_one_is_named(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead(settings(lanes, "list")) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["5-0", "one"],
        ["6-0", "two/b"],
        ["5-0", "two/b"],
    ]
    assert dead(settings(lanes, "list", lane="one")) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_none_is_said_to_be_there(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead(settings(redis_url, "list")) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no request was given up\n")
    assert dead(settings(redis_url, "list", lane="one")) == 0
    assert capsys.readouterr().err == "no request of model 'one' was given up\n"


def test_an_entry_of_several_lanes_is_not_guessed(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="one, two/b: choose with --served-model-name"):
        dead(settings(lanes, "drop", "5-0"))
    assert dead(settings(lanes, "drop", "5-0", lane="two/b")) == 0
    assert dead(settings(lanes, "drop", "5-0")) == 0
    assert dead(settings(lanes, "show", "6-0")) == 0
    assert '"model": "two/b"' in capsys.readouterr().out
    with pytest.raises(CommandError, match="there is no entry '5-0'"):
        dead(settings(lanes, "drop", "5-0"))
