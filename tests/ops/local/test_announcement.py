"""The lines that `quire serve` prints once it serves."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from quire.ops.local.announcement import announcement, answers, local_url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:81"),
        ("0.0.0.0", "http://127.0.0.1:81"),
        ("", "http://127.0.0.1:81"),
        ("::", "http://[::1]:81"),
        ("fe80::1", "http://[fe80::1]:81"),
        ("name", "http://name:81"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert local_url(host, 81) == url


def test_nothing_answers_at_a_closed_port() -> None:
    assert not answers("http://127.0.0.1:1", "/")


def test_the_first_line_is_for_programs_and_the_last_one_can_be_pasted() -> None:
    lines = announcement("http://127.0.0.1:1", ["it's"], Path("/logs"), False, needs_key=False).splitlines()
    assert lines[0] == "ready: http://127.0.0.1:1"
    assert not any("page" in line for line in lines), "no page answers"
    assert any(line.endswith("quire chat --url http://127.0.0.1:1") for line in lines)
    words = shlex.split(lines[-1])
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:1/v1/chat/completions"]
    assert '"model": "it\'s"' in words[-1]


def test_the_commands_have_a_place_for_the_key_that_calls_need() -> None:
    lines = announcement("http://127.0.0.1:1", ["m"], Path("/logs"), True, needs_key=True).splitlines()
    assert any(line.endswith("quire chat --api-key KEY") for line in lines)
    assert "Authorization: Bearer KEY" in shlex.split(lines[-1])
