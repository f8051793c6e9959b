"""URLs of servers with the OpenAI API, as users write them, and the messages of servers with a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.shared.config.command_line import CommandError


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """The parts of a URL. `path` ends in /v1. `shown` is for output: without password and path."""

    secure: bool
    host: str
    port: int | None
    path: str
    shown: str

    @property
    def base(self) -> str:
        """The base URL of the API, which ends in /v1, without a password."""
        return self.shown + self.path


def parse_url(url: str, flag: str = "--url") -> ServerUrl:
    """Parse a URL. `flag`: the flag that the URL came from, for errors. Raise CommandError with the remedy."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise CommandError(f"{flag} {url}: {error}; give http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"{flag} {url} is not the URL of a server; give http://host:port or https://host")
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return ServerUrl(parts.scheme == "https", parts.hostname, port, path, shown)


def with_remedy(message: str, remedy: str) -> str:
    """Join a server's message, which may end with a full stop, and a remedy. An empty remedy adds nothing."""
    return f"{message.rstrip().rstrip('.')}; {remedy}" if remedy else message
