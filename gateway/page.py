"""The chat page at `/`: static files of this package, with headers that let it load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = {"/": "index.html", "/chat.css": "chat.css", "/chat.js": "chat.js", "/icon.svg": "icon.svg"}

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def routes() -> list[web.RouteDef]:
    folder = files("gateway") / "static"

    def page(name: str) -> web.RouteDef:
        body = (folder / name).read_bytes()
        content_type = _TYPES[name.rsplit(".", 1)[1]]

        async def show(request: web.Request) -> web.Response:
            return web.Response(body=body, content_type=content_type, charset="utf-8", headers=HEADERS)

        path = next(path for path, file in _FILES.items() if file == name)
        return web.get(path, show)

    return [page(name) for name in _FILES.values()]
