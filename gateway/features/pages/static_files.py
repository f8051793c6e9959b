"""Serves the pages: every file of `static/`, with headers that keep them from loading anything from other servers.

`/` is index.html, `/NAME` is NAME.html, and all other files are served under their names. A browser revalidates each
file (ETag), so that the pages of a new gateway are never mixed with files of an old one. Scripts are served without
their comments, which are a seventh of their size.

The libraries of others, in `static/vendor/`, are served as they are. Their paths have their versions, so a browser
keeps them without asking again.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import ETag, hdrs, web
from aiohttp.typedefs import Handler

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "json": "application/json",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
VENDOR = "vendor/"
# Comments of a script that begin a line. Comments behind code stay: only a parser could tell them from texts.
_COMMENT = re.compile(r"^ *(?://.*|/\*\*(?:[^*]|\*(?!/))*\*/)$", re.MULTILINE)

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
# The cache of files whose paths have their versions.
KEPT = "public, max-age=31536000, immutable"


def names() -> list[str]:
    """Return the names of the static files, with their folders."""
    return sorted(_names(files("quire.gateway.features.pages") / "static", ""))


def path_of(name: str) -> str:
    """Return the URL path of a static file."""
    if _ending(name) != "html":
        return f"/{name}"
    return "/" if name == "index.html" else f"/{name.removesuffix('.html')}"


def content(name: str) -> bytes:
    """Return what is served of a static file. Lines keep their numbers: of a comment, its line ends stay."""
    body = (files("quire.gateway.features.pages") / "static" / name).read_bytes()
    if _ending(name) != "js" or name.startswith(VENDOR):
        return body
    return _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), body.decode()).encode()


def routes() -> list[web.RouteDef]:
    return [web.get(path_of(name), _handler(name)) for name in names()]


def _names(folder: Traversable, prefix: str) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _names(entry, f"{prefix}{entry.name}/")
        elif _ending(entry.name) in _TYPES:
            yield prefix + entry.name


def _ending(name: str) -> str:
    return name.rsplit(".", 1)[-1]


@cache
def _packed(body: bytes) -> tuple[bytes, str]:
    """Return a content compressed, and its digest."""
    return gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:32]


@cache
def _handler(name: str) -> Handler:
    """Read one file, and return the handler that serves it. The first request compresses it."""
    body = content(name)
    content_type = _TYPES[_ending(name)]
    headers = {**HEADERS, "Cache-Control": KEPT} if name.startswith(VENDOR) else HEADERS

    async def show(request: web.Request) -> web.StreamResponse:
        packed, digest = _packed(body)
        is_packed = "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "")
        etag = ETag(f"{digest}-gzip" if is_packed else digest)
        known = request.if_none_match or ()
        if any(given.value in (etag.value, "*") for given in known):
            response = web.Response(status=304, headers=headers)
        else:
            response = web.Response(
                body=packed if is_packed else body, content_type=content_type, charset="utf-8", headers=headers
            )
            if is_packed:
                response.headers[hdrs.CONTENT_ENCODING] = "gzip"
        response.etag = etag
        return response

    return show
