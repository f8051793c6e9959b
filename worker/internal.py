"""The worker's own HTTP server, for operators: `/health`, `/metrics` and `/debug/blocks`. Clients never come here.

Everything is read on the engine's thread, between two steps; an engine that does not answer in time is a 503.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from shared.broker import WORKER_TTL_S
from worker.engine.engine import Engine
from worker.engine.usage import snapshot, usage
from worker.engine_loop import EngineGone, EngineLoop
from worker.metrics import CONTENT_TYPE_LATEST, EngineMetrics

log = logging.getLogger(__name__)

# How long a step may keep us waiting.
ANSWER_S = 2.0

T = TypeVar("T")


class PortError(RuntimeError):
    """The internal server cannot listen: which setting, which value, and the remedy."""


class Unavailable(Exception):
    """The engine does not answer: why."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket for the server. Raises PortError."""
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
    """Serves one engine's inside on a bound socket."""

    def __init__(self, engine: EngineLoop, listener: socket.socket) -> None:
        self._engine = engine
        self._listener = listener
        self._metrics = EngineMetrics()
        app = web.Application(middlewares=[_errors])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/debug/blocks", self.blocks),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Answer from now on. Raises PortError if another process has come to listen there since `bind`."""
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

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine moves, idle or not."""
        reason = self._stuck()
        if reason:
            return _json(503, {"status": "unavailable", "reason": reason})
        return _json(200, {"status": "ok", "steps": self._engine.status.steps})

    async def metrics(self, request: web.Request) -> web.Response:
        text = self._metrics.render(await self._ask(usage))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def blocks(self, request: web.Request) -> web.Response:
        found = await self._ask(snapshot)
        body = await asyncio.to_thread(lambda: _dump(found.render()))
        return web.Response(body=body, content_type="application/json")

    async def _ask(self, function: Callable[[Engine], T]) -> T:
        """What the function says of the engine. Raises Unavailable."""
        future = self._engine.call(function)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(future)  # which is cancelled with us: nobody waits for its result
        except TimeoutError:
            raise Unavailable(self._stuck() or f"the engine is busy: no answer within {ANSWER_S:g} s") from None
        except EngineGone as error:
            raise Unavailable(str(error)) from None

    def _stuck(self) -> str:
        if self._engine.failure is not None:
            return f"the engine's thread failed: {self._engine.failure!r}"
        if not self._engine.is_alive():
            return "the engine's thread has ended"
        still_s = time.monotonic() - self._engine.ticked_at
        # As for the heartbeat, a step may take a few times as long as the slowest one did.
        is_stuck = still_s > max(WORKER_TTL_S, 3 * self._engine.status.slowest_step_s)
        return f"the engine has not moved for {still_s:.0f} s" if is_stuck else ""


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every failure as JSON: `{"error": "..."}`."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Unavailable as error:
        return _json(503, {"error": str(error)})
    except web.HTTPNotFound:
        return _json(404, {"error": f"there is no {request.path}; there are /health, /metrics and /debug/blocks"})
    except web.HTTPException as error:
        return _json(error.status, {"error": error.reason}, error.headers)
    except Exception:
        log.exception("%s failed", request.path)
        return _json(500, {"error": "internal error; the log says more"})


def _json(status: int, value: Any, headers: Any = None) -> web.Response:
    kept = {name: text for name, text in (headers or {}).items() if name == "Allow"}
    return web.Response(status=status, body=_dump(value), content_type="application/json", headers=kept)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
