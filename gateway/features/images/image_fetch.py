"""Fetches images from the hosts of `--image-hosts`.

A client must reach nothing through the gateway that it could not reach itself. So a URL must have one of few forms and
a listed host, after each redirect as well. A host is resolved once for each request, all of its addresses must be
public, and the connection goes to one of them. No proxy of the environment is used, no credentials and no cookies.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from quire.shared.images.picture_error import PictureError
from quire.shared.process.errors import StartError

MAX_URL = 4096
MAX_REDIRECTS = 3
# Seconds for all requests of an image.
FETCH_S = 10.0
# Images that are fetched at a time, of all owners and of one.
MAX_FETCHES, MAX_OWN_FETCHES = 16, 8
HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"}

_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(https?)://([a-z0-9.-]+?)\.?(?::([0-9]{1,5}))?([/?][!-\[\]-~]*)?", re.ASCII | re.IGNORECASE)
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
# The last label begins with a letter, so that no number is a host.
_HOST = re.compile(rf"(\*\.)?({_LABEL}\.)*[a-z]([a-z0-9-]*[a-z0-9])?(:[0-9]{{1,5}})?", re.ASCII)
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
# Networks of tunnels to others, and those that versions of Python judge in different ways.
_OTHERS = [
    ipaddress.ip_network(name)
    for name in ("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")
]

# Returns the addresses of a host.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def is_public(address: str) -> bool:
    """Return whether an address is a public one of a single machine.

    IPv4 addresses inside of IPv6 ones are not, in any form.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if found.version == 6 and found not in _UNICAST_6:
        return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _OTHERS)


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host as the system resolves it. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def public_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for a connection to an address of `getaddrinfo`. Raises PictureError for one that is not public.

    This is the last check before the connection.
    """
    family, kind, protocol, _, place = address
    if not is_public(place[0]):
        raise PictureError("its host has an address that is not public")
    return socket.socket(family, kind, protocol)


@dataclass(frozen=True, slots=True)
class ImageHosts:
    """The hosts of the setting, each as `host:port`; without a port, both default ports."""

    names: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> ImageHosts:
        """Return the hosts of the setting. Raises StartError."""
        names = [name for part in text.split(",") if (name := part.strip().lower())]
        for name in names:
            if not _HOST.fullmatch(name):
                raise StartError(
                    f"--image-hosts (QUIRE_IMAGE_HOSTS): {name!r} is no name of a host; give names such as "
                    "images.example.com, *.example.com or images.example.com:8443, separated by commas."
                )
        return cls(frozenset(names))

    def has(self, host: str, port: int, is_default: bool) -> bool:
        """Return whether images may come from a host and port. is_default: the port is that of the scheme."""
        above = [f"*.{host.split('.', count)[count]}" for count in range(1, host.count(".") + 1)]
        ends = ("", f":{port}") if is_default else (f":{port}",)
        return any(name + end in self.names for name in (host, *above) for end in ends)


class FetchTimeout(PictureError):
    """The host has not sent an image in time."""


class FetchesFull(Exception):
    """Other fetches have not ended in time."""


class ImageFetcher:
    """Fetches the images of all calls of a gateway process. wait_s: longest wait until other fetches have ended."""

    def __init__(
        self,
        hosts: ImageHosts,
        resolve: Resolve = resolve_host,
        make_socket: Callable[..., socket.socket] = public_socket,
        wait_s: float = 30.0,
    ) -> None:
        self._hosts = hosts
        self._resolve = resolve
        self._make_socket = make_socket
        self._wait_s = wait_s
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        # By owner, while they fetch or wait.
        self._own_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @property
    def is_on(self) -> bool:
        """True if there are hosts from which images may come."""
        return bool(self._hosts.names)

    async def fetch(self, url: str, most: int, owner: str = "") -> bytes | None:
        """Return the content of a URL; None if it has more than `most` bytes.

        Raises PictureError with the reason, FetchesFull.
        """
        async with self._slot(owner):
            return await self._fetch_in_time(url, most)

    @asynccontextmanager
    async def _slot(self, owner: str) -> AsyncIterator[None]:
        """Wait until an owner may fetch an image. Raises FetchesFull."""
        own = self._own_slots.setdefault(owner, asyncio.Semaphore(MAX_OWN_FETCHES))
        async with AsyncExitStack() as slots:
            try:
                async with asyncio.timeout(self._wait_s):
                    await slots.enter_async_context(own)
                    await slots.enter_async_context(self._slots)
            except TimeoutError:
                raise FetchesFull from None
            yield

    async def _fetch_in_time(self, url: str, most: int) -> bytes | None:
        try:
            async with asyncio.timeout(FETCH_S):
                return await self._fetch(url, most)
        except TimeoutError:
            raise FetchTimeout(f"fetching it takes more than {FETCH_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PictureError(f"fetching it fails: {str(error)[:200] or type(error).__name__}") from error

    async def _fetch(self, url: str, most: int) -> bytes | None:
        connector = aiohttp.TCPConnector(
            resolver=_PublicResolver(self._resolve),
            use_dns_cache=False,
            force_close=True,
            happy_eyeballs_delay=None,
            socket_factory=self._make_socket,
        )
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, headers=HEADERS
        ) as session:
            for _ in range(1 + MAX_REDIRECTS):
                async with session.get(self._checked(url), allow_redirects=False) as response:
                    if response.status not in (301, 302, 303, 307, 308):
                        return await _content(response, most)
                    target = urljoin(url, response.headers.get("Location", ""))
                if url[:6].lower() == "https:" and target[:6].lower() != "https:":
                    raise PictureError("its host redirects to an address without TLS")
                url = target
        raise PictureError(f"its host redirects more than {MAX_REDIRECTS} times")

    def _checked(self, url: str) -> URL:
        """Return a URL as the client of HTTP gets it, made of checked parts. Raises PictureError."""
        match = _URL.fullmatch(url.partition("#")[0]) if len(url) <= MAX_URL else None
        if match is None:
            raise PictureError(
                f"an address must be http(s)://HOST/PATH in ASCII, without user and password, of at most {MAX_URL} "
                "characters"
            )
        scheme, host = match[1].lower(), match[2].lower()
        port = int(match[3] or _PORTS[scheme])
        if not self._hosts.has(host, port, port == _PORTS[scheme]):
            place = host if port == _PORTS[scheme] else f"{host}:{port}"
            raise PictureError(f"this server fetches no images from {place} (--image-hosts)")
        path, _, query = (match[4] or "/").partition("?")
        return URL.build(scheme=scheme, host=host, port=port, path=path or "/", query_string=query, encoded=True)


class _PublicResolver(AbstractResolver):
    """Resolves hosts all of whose addresses are public."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await self._resolve(host, port)
        if not all(map(is_public, addresses)):
            raise PictureError("its host has an address that is not public")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in dict.fromkeys(addresses)
        ]

    async def close(self) -> None: ...


async def _content(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    if response.status != 200:
        raise PictureError(f"its host answers with the status {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise PictureError("its host compresses it although it was asked not to")
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > most:
            return None
    return bytes(data)
