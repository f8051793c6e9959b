"""The forms of `--redis-url`: one Redis, a Redis with Sentinels, or a Redis Cluster. No part of a URL is ignored.

    redis://user:password@host:6379/0                    rediss:// for TLS
    unix:///path/to/redis.sock?db=0
    redis+sentinel://host:26379,host:26379/service/0     rediss+sentinel:// for TLS
    redis+cluster://host:7000,host:7000                  rediss+cluster:// for TLS

The query may have redis-py's options for credentials and TLS, and no other options of redis-py. Timeouts and retries
are fixed by `shared/redis/clients.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from quire.shared.process.errors import StartError

FORMS = (
    "redis://host:6379/0, redis+sentinel://host:26379,host:26379/service/0 or redis+cluster://host:7000,host:7000 "
    "(rediss for TLS), or unix:///path"
)
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
REDIS_URL_HELP = (
    "URL of the queue's Redis: redis://, redis+sentinel://, redis+cluster:// or unix:// (docs/how-to/redis.md)."
)
DEFAULT_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}

_SCHEME = re.compile(r"(rediss?)(?:\+(sentinel|cluster))?")
_NODE = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]@/?#]+)?(?::([0-9]{1,5}))?")
_TLS = {
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
_CERT_REQS = ("none", "optional", "required")
_CUT = "it has no redis:// before its @, or a / or ? between them; write / ? and [ of a password as %2F %3F and %5B"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class BrokerUnavailable(StartError, ConnectionError):
    """Redis does not answer, or cannot hold the queue. The text names the fault, the URL and the remedy."""


class Address(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL.

    shown: the URL without passwords. nodes: the server itself, Sentinels, or some nodes of the cluster. path: of a unix
    socket, instead of nodes. options: redis-py's options of connections to Redis; sentinel_options: to Sentinels.
    """

    shown: str
    kind: Literal["single", "sentinel", "cluster"]
    nodes: tuple[Address, ...]
    service: str
    path: str
    is_tls: bool
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def parse_redis_url(text: str) -> RedisUrl:
    """Parse a URL. Raise BrokerUnavailable, whose text has the URL without passwords, the fault and the remedy."""
    try:
        return _parse(text)
    except ValueError as error:
        why = _CUT if _is_cut(text) else str(error)
    raise BrokerUnavailable(
        f"{redact(text)!r} is not a Redis URL: {why}. Give --redis-url (QUIRE_REDIS_URL) as {FORMS}."
    )


def redact(url: str) -> str:
    """Return a Redis URL without its passwords."""
    url = re.sub(r"(?<=password=)[^&]*", "***", url, flags=re.IGNORECASE)
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{credentials.split(':')[0] + ':***@' if at else ''}{host}"


def _is_cut(text: str) -> bool:
    """Return whether the faulty part of a URL may be a piece of a password, which an error must not show."""
    try:
        parts = urlsplit(text)
    except ValueError:  # a bracket
        return "@" in text
    return parts.scheme != "unix" and "@" in re.sub("password=[^&]*", "", f"{parts.path}?{parts.query}")


def _parse(text: str) -> RedisUrl:
    parts = urlsplit(text)
    if parts.fragment or "#" in text:
        raise ValueError("it has a #; write that of a password as %23")
    query = _query(parts.query)
    if parts.scheme == "unix":
        return _unix(text, parts.netloc, parts.path, query)
    scheme = _SCHEME.fullmatch(parts.scheme)
    if not scheme:
        raise ValueError(f"it does not begin with one of the forms that there are ({parts.scheme or 'no'} scheme)")
    kind: Any = scheme[2] or "single"
    is_tls = scheme[1] == "rediss"
    credentials, _, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_node(part, DEFAULT_PORTS[kind]) for part in hosts.split(","))
    if kind == "single" and len(nodes) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    service, database = _path(kind, parts.path)
    options = _options(query, credentials, is_tls)
    sentinel_options = {name[9:]: options.pop(name) for name in list(options) if name.startswith("sentinel_")}
    if sentinel_options and kind != "sentinel":
        raise ValueError("sentinel_username and sentinel_password are for redis+sentinel://")
    if is_tls:
        sentinel_options |= {name: value for name, value in options.items() if name.startswith("ssl_")}
    number = _database(options.pop("db", ""), database)
    if kind == "cluster" and number:
        raise ValueError(f"a cluster has the database 0 only, not {number}")
    if kind != "cluster":
        options["db"] = number
    return RedisUrl(redact(text), kind, nodes, service, "", is_tls, options, sentinel_options)


def _unix(text: str, netloc: str, path: str, query: dict[str, str]) -> RedisUrl:
    credentials, _, host = netloc.rpartition("@")
    if host or not path.startswith("/"):
        raise ValueError("the path of a unix socket begins with a third slash")
    options = _options(query, credentials, is_tls=False)
    if any(name.startswith("sentinel_") for name in options):
        raise ValueError("sentinel_username and sentinel_password are for redis+sentinel://")
    options["db"] = _database(options.pop("db", ""), "")
    return RedisUrl(redact(text), "single", (), "", unquote(path), False, options, {})


def _query(query: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        if name in values:
            raise ValueError(f"{name} is there twice")
        values[name] = value
    return values


def _node(text: str, default_port: int) -> Address:
    match = _NODE.fullmatch(text)
    port = int(match[2] or default_port) if match else 0
    if not match or not 0 < port < 65536:
        raise ValueError(f"{text!r} is not host:port")
    return Address(unquote((match[1] or "localhost").strip("[]")), port)


def _path(kind: str, path: str) -> tuple[str, str]:
    """Return the name of the Sentinels' service, and the database as text."""
    names = path.removeprefix("/").split("/") if path.strip("/") else []
    if kind == "sentinel":
        if not names or not names[0]:
            raise ValueError("the service that the Sentinels watch is missing behind the hosts, as /mymaster")
        service, *names = names
    else:
        service = ""
    if len(names) > 1:
        raise ValueError(f"the path {path!r} says more than a database")
    return unquote(service), names[0] if names else ""


def _database(asked: str, in_path: str) -> int:
    if asked and in_path and asked != in_path:
        raise ValueError(f"it names two databases, {in_path} and {asked}")
    number = asked or in_path or "0"
    if not re.fullmatch(r"[0-9]{1,5}", number, re.ASCII):
        raise ValueError(f"{number!r} is not the number of a database")
    return int(number)


def _options(query: dict[str, str], credentials: str, is_tls: bool) -> dict[str, Any]:
    known = {"db", "username", "password", "sentinel_username", "sentinel_password"} | (_TLS if is_tls else set())
    options: dict[str, Any] = {}
    for name, value in query.items():
        if name in _TLS - known:
            raise ValueError(f"{name} needs rediss://")
        if name not in known:
            raise ValueError(f"{name} is not an option; there are {', '.join(sorted(known))}")
        if name == "ssl_cert_reqs" and value not in _CERT_REQS:
            raise ValueError(f"ssl_cert_reqs is one of {', '.join(_CERT_REQS)}, not {value!r}")
        if name == "ssl_check_hostname" and value.lower() not in _FLAGS:
            raise ValueError(f"ssl_check_hostname is true or false, not {value!r}")
        options[name] = _FLAGS[value.lower()] if name == "ssl_check_hostname" else value
    user, _, password = credentials.partition(":")
    for name, value in (("username", unquote(user)), ("password", unquote(password))):
        if value and options.setdefault(name, value) != value:
            raise ValueError(f"it names two {name}s")
    return options
