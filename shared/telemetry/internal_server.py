"""The internal HTTP server of each process: endpoints for operators, on a port of its own, not for clients.

An error is a JSON object: `{"error": "..."}`.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from quire.shared.process.errors import StartError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PortError(StartError):
    """The internal server cannot listen. The text names the setting, its value and the remedy."""


class ServiceUnavailable(Exception):
    """An endpoint cannot answer now, and returns 503. The text is the reason."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket for the server. Raise PortError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PortError(
            f"--internal-host {host}: {error.strerror}; give an address of this machine, such as 127.0.0.1"
        ) from error
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except PermissionError as error:
        listener.close()
        raise PortError(
            f"--internal-port {port} needs the rights of root; give one from 1024 to 65535, or 0"
        ) from error
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortError(
                f"--internal-port {port} on {host}: {error.strerror}; give another one, or 0 for any free one"
            ) from error
        raise PortError(
            f"--internal-host {host}: {error.strerror}; give an address of this machine, such as 127.0.0.1"
        ) from error
    return listener


class InternalServer:
    """Answers GETs of a few paths on a bound socket."""

    def __init__(self, listener: socket.socket, handlers: Mapping[str, Handler]) -> None:
        self._listener = listener
        self._paths = list(handlers)
        app = web.Application(middlewares=[self._errors])
        app.add_routes([web.get(path, handler) for path, handler in handlers.items()])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def paths(self) -> str:
        """The paths as a phrase: `/metrics, /health and /debug/blocks`."""
        return f"{', '.join(self._paths[:-1])} and {self._paths[-1]}"

    async def start(self) -> None:
        """Start to answer. Raise PortError if another process has begun to listen on the port since `bind`."""
        await self._runner.setup()
        try:
            await web.SockSite(self._runner, self._listener).start()
        except OSError as error:
            raise PortError(
                f"--internal-port {self._listener.getsockname()[1]}: {error.strerror}; give another one, or 0 for any "
                "free one"
            ) from error

    async def close(self) -> None:
        await self._runner.cleanup()
        self._listener.close()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ServiceUnavailable as error:
            return json_response(503, {"error": str(error)})
        except web.HTTPNotFound:
            return json_response(404, {"error": f"there is no {request.path}; there are {self.paths}"})
        except web.HTTPException as error:
            return json_response(error.status, {"error": error.reason}, error.headers)
        except Exception:
            log.exception("%s failed", request.path)
            return json_response(500, {"error": "internal error; the log says more"})


def json_response(status: int, value: Any, headers: Any = None) -> web.Response:
    """Return a response with `value` as JSON. Only the header `Allow` of `headers` is kept."""
    kept = {name: text for name, text in (headers or {}).items() if name == "Allow"}
    return web.Response(status=status, body=dump(value), content_type="application/json", headers=kept)


def dump(value: Any) -> bytes:
    """Return `value` as one line of JSON."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
