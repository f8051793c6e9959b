"""The dead-letter queue: list, show and drop over several lanes."""

from __future__ import annotations

import pytest
from redis import Redis

from quire.gateway.admin.dead_letter_settings import DeadLetterSettings
from quire.gateway.admin.dead_letters import run
from quire.shared.command_line import CommandError
from quire.shared.keys import LaneKeys
from quire.shared.messages import GenerationRequest, SamplingParams

FIELDS = {"id": "r", "class": "standard", "worker": "w", "emitted": "3", "body": "x", "metadata": ""}


@pytest.fixture
def lanes(redis_url: str) -> str:
    """Two lanes with an entry of the same id, and one more in the second."""
    with Redis.from_url(redis_url) as client:
        for lane in ("one", "two/b"):
            client.xadd(LaneKeys(lane).dead, dict(FIELDS), id="5-0")
        client.xadd(LaneKeys("two/b").dead, dict(FIELDS), id="6-0")
    return redis_url


def settings(redis_url: str, action: str, entry: str = "", lane: str = "") -> DeadLetterSettings:
    return DeadLetterSettings(action=action, entry=entry, redis_url=redis_url, served_model_name=lane)


def test_all_lanes_are_listed_unless_one_is_named(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings(lanes, "list"), {}) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["5-0", "one"],
        ["6-0", "two/b"],
        ["5-0", "two/b"],
    ]
    assert run(settings(lanes, "list", lane="one"), {}) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_none_is_said_to_be_there(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings(redis_url, "list"), {}) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no request was given up\n")
    assert run(settings(redis_url, "list", lane="one"), {}) == 0
    assert capsys.readouterr().err == "no request of model 'one' was given up\n"


def test_an_entry_of_several_lanes_is_not_guessed(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="one, two/b: choose with --served-model-name"):
        run(settings(lanes, "drop", "5-0"), {})
    assert run(settings(lanes, "drop", "5-0", lane="two/b"), {}) == 0
    assert run(settings(lanes, "drop", "5-0"), {}) == 0
    assert run(settings(lanes, "show", "6-0"), {}) == 0
    assert '"model": "two/b"' in capsys.readouterr().out
    with pytest.raises(CommandError, match="there is no entry '5-0'"):
        run(settings(lanes, "drop", "5-0"), {})


def test_a_retry_is_a_new_request_in_the_queue(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = GenerationRequest("old", "one", (1, 2), SamplingParams(max_tokens=3)).encode()
    with Redis.from_url(redis_url) as client:
        of_tenant = {"tenant": "standard 250 acme/web", "user": "2 ab"}
        client.xadd(LaneKeys("one").dead, {**FIELDS, **of_tenant, "body": body}, id="5-0")
        assert run(settings(redis_url, "retry", "5-0"), {}) == 0
        assert "queued again as request " in capsys.readouterr().out
        assert client.xlen(LaneKeys("one").dead) == 0
        assert client.xlen(LaneKeys("one").queue("standard")) == 1
        [request] = client.scan_iter(LaneKeys("one").request("*"))
        assert client.hmget(request, "tenant", "user") == [b"standard 250 acme/web", b"2 ab"]


def test_an_unreadable_request_cannot_be_retried_but_is_shown(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="entry 6-0 cannot be read"):
        run(settings(lanes, "retry", "6-0"), {})
    assert run(settings(lanes, "show", "6-0"), {}) == 0
    assert '"unreadable"' in capsys.readouterr().out


def test_an_action_on_one_needs_its_entry(lanes: str) -> None:
    with pytest.raises(CommandError, match="--entry is missing: give one that the action `list` shows"):
        run(settings(lanes, "show"), {})


def test_no_redis_is_named_with_the_flag() -> None:
    with pytest.raises(CommandError, match=r"^no Redis at redis://127.0.0.1:1/0: .*; pass another --redis-url"):
        run(settings("redis://127.0.0.1:1/0", "list"), {})
