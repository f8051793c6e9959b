from __future__ import annotations

import pytest

from quire.shared.redis.url import Address, BrokerUnavailable, parse_redis_url, redact


def test_one_server() -> None:
    url = parse_redis_url("redis://user:p%40ss@host:6380/3")
    assert (url.kind, url.nodes, url.is_tls) == ("single", (Address("host", 6380),), False)
    assert url.options == {"username": "user", "password": "p@ss", "db": 3}
    assert parse_redis_url("redis://").nodes == (Address("localhost", 6379),)
    assert parse_redis_url("redis://[::1]:7000").nodes == (Address("::1", 7000),)


def test_a_unix_socket() -> None:
    url = parse_redis_url("unix:///run/with%20space/redis.sock?db=2&password=x")
    assert (url.path, url.options) == ("/run/with space/redis.sock", {"db": 2, "password": "x"})


def test_sentinels() -> None:
    url = parse_redis_url("redis+sentinel://:hidden@a,b:7,[::1]:8/my%20master/2?sentinel_password=other")
    assert (url.kind, url.service) == ("sentinel", "my master")
    assert url.nodes == (Address("a", 26379), Address("b", 7), Address("::1", 8))
    assert url.options == {"password": "hidden", "db": 2}
    assert url.sentinel_options == {"password": "other"}
    assert "hidden" not in url.shown
    assert "other" not in url.shown


def test_a_cluster_with_tls() -> None:
    url = parse_redis_url("rediss+cluster://a:1,b:2?ssl_ca_certs=/ca.pem&ssl_check_hostname=false&password=x")
    assert (url.kind, url.is_tls) == ("cluster", True)
    assert url.options == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False, "password": "x"}


def test_sentinels_are_asked_over_tls_too() -> None:
    assert parse_redis_url("rediss+sentinel://a/s?ssl_ca_certs=/ca.pem").sentinel_options == {"ssl_ca_certs": "/ca.pem"}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://host", "http scheme"),
        ("host:6379", "scheme"),
        ("redis://a:1,b:2", r"several hosts need redis\+sentinel"),
        ("redis://host:0", "'host:0' is not host:port"),
        ("redis://host:70000", "is not host:port"),
        ("redis+cluster://a:1,,b:x", "is not host:port"),
        ("redis://host/one", "'one' is not the number of a database"),
        ("redis://host/0/1", "says more than a database"),
        ("redis://host/1?db=2", "two databases, 1 and 2"),
        ("redis+cluster://host/1", "a cluster has the database 0 only, not 1"),
        ("redis+sentinel://host", "the service that the Sentinels watch is missing"),
        ("redis+sentinel://host/s/x", "'x' is not the number"),
        ("redis://host?socket_timeout=1", "socket_timeout is not an option; there are db, password"),
        ("redis://host?retry_on_timeout=yes", "retry_on_timeout is not an option"),
        ("redis://host?ssl_ca_certs=/x", "ssl_ca_certs needs rediss://"),
        ("rediss://host?ssl_cert_reqs=maybe", "none, optional, required"),
        ("rediss://host?ssl_check_hostname=maybe", "true or false"),
        ("redis://host?sentinel_password=x", "for redis.sentinel"),
        ("redis://host?db=1&db=1", "db is there twice"),
        ("redis://host?db", "bad query field"),
        ("redis://user:a@host?username=other", "two usernames"),
        ("redis://:a#b@host", "write that of a password as %23"),
        ("unix://run/redis.sock", "third slash"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(url: str, why: str) -> None:
    with pytest.raises(BrokerUnavailable, match=why) as raised:
        parse_redis_url(url)
    assert "Give --redis-url (QUIRE_REDIS_URL) as redis://host:6379/0" in str(raised.value)


def test_passwords_are_not_shown() -> None:
    url = "redis+sentinel://user:one@a,b/s?password=two&sentinel_password=three&db=1"
    assert redact(url) == "redis+sentinel://user:***@a,b/s?password=***&sentinel_password=***&db=1"
    with pytest.raises(BrokerUnavailable) as raised:
        parse_redis_url("redis://:secret@host:x")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hid/den@host:6379/0",
        "redis://:12/hidden@host",
        "redis://:hid?den@host",
        "redis://:hid?den=1@host",
        "redis://user:p@hidden/hidden@host",
        "redis://user:hid[den@host",
        "redis+sentinel://:hid/den@host/s",
        "redis:/:hidden@host",
        ":hidden@host:6379",
        "user:hidden@host:6379",
        "redis://host?PASSWORD=hidden",
    ],
)
def test_no_part_of_a_password_that_is_not_written_as_it_must_be_is_shown(url: str) -> None:
    with pytest.raises(BrokerUnavailable) as raised:
        parse_redis_url(url)
    shown = str(raised.value)
    assert not any(part in shown for part in ("hid/", "hid?", "'hid", ":hid", "hidden", "den@", "den=")), shown
    assert "%2F" in shown or "PASSWORD is not an option" in shown


def test_an_at_sign_is_no_end_of_a_password_in_the_query() -> None:
    assert parse_redis_url("redis://host/0?password=a@b").options["password"] == "a@b"
    with pytest.raises(BrokerUnavailable, match="'one' is not the number of a database"):
        parse_redis_url("redis://host/one?password=a@b")
