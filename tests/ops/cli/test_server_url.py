"""URLs of servers, as users write them."""

from __future__ import annotations

import pytest

from quire.ops.cli.server_url import parse_url, with_remedy
from quire.shared.command_line import CommandError


@pytest.mark.parametrize("url", ["host:81", "http://host:81", "http://host:81/", "http://host:81/v1", "host:81/v1/"])
def test_scheme_and_v1_may_be_left_out(url: str) -> None:
    found = parse_url(url)
    assert (found.secure, found.host, found.port, found.path) == (False, "host", 81, "/v1")
    assert found.base == "http://host:81/v1"


def test_a_password_is_not_shown_and_a_path_is_kept() -> None:
    found = parse_url("https://me:word@host/proxy")
    assert (found.secure, found.port, found.path) == (True, None, "/proxy/v1")
    assert found.shown == "https://host"


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999"])
def test_other_urls_are_refused_with_their_flag(url: str) -> None:
    with pytest.raises(CommandError, match=r"^--against .*; give http://host:port"):
        parse_url(url, "--against")


def test_a_remedy_follows_a_sentence_without_its_full_stop() -> None:
    assert with_remedy("Give a key as Bearer KEY.", "pass --api-key") == "Give a key as Bearer KEY; pass --api-key"
    assert with_remedy("Who are you?", "pass --api-key") == "Who are you?; pass --api-key"
    assert with_remedy("Not now.", "") == "Not now."
