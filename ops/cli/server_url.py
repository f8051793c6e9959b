"""The address of a server that speaks the OpenAI API, as a user writes it: with or without a scheme, and /v1."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.shared.command_line import CommandError


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where to connect; `path` ends in /v1. `shown` is for people: without a password, and without the path."""

    secure: bool
    host: str
    port: int | None
    path: str
    shown: str

    @property
    def base(self) -> str:
        """The URL behind which the API's names come, without a password."""
        return self.shown + self.path


def parse_url(url: str, flag: str = "--url") -> ServerUrl:
    """Raises CommandError with the remedy. `flag` is where the URL came from."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise CommandError(f"{flag} {url}: {error}; give http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"{flag} {url} is no address of a server; give http://host:port or https://host")
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return ServerUrl(parts.scheme == "https", parts.hostname, port, path, shown)
