"""`/worker-of`: the worker of a chat for the chat page, which can have it killed to show how the answer is resumed.

The routes exist only in a gateway to which `quire serve` has given a pipe for this (`shared/process/kill_pipe.py`), and
only if it listens on the loopback interface and needs no API keys. Each call is checked again, because a page of any
website in the browser of this machine can reach a loopback port, and so can whoever a proxy lets through: a call must
come from this machine, name it as the host, and be one of a page of this server. All other calls get 404.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from quire.gateway.api.chat import ChatDialect
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.serving.calls import find
from quire.gateway.serving.dispatch import ModelDirectory, by_id
from quire.gateway.serving.service import Gateway
from quire.shared.config.service_settings import is_loopback
from quire.shared.process.kill_pipe import WorkerKiller
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.states import RequestState

PATH = "/worker-of"
# Headers with which a proxy passes on a call of somebody else.
FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")

# An event in the history of a request: a worker claimed it after this number of tokens.
RESUMED = re.compile(r"^\d* claimed ([1-9][0-9]*) ", re.MULTILINE | re.ASCII)
# Seconds that an answer gets to begin before its worker is killed, and seconds between two looks at it.
MAX_WAIT_S = 30.0
POLL_S = 0.005


class NotKilled(ApiError):
    status = 409
    type = "invalid_request_error"
    code = "not_killed"


def routes(directory: ModelDirectory, environ: Mapping[str, str]) -> list[web.RouteDef]:
    """Return the routes; none if this process cannot or must not have workers killed."""
    settings, killer = directory.process.settings, WorkerKiller.of(environ)
    if killer is None or not settings.is_open or not is_loopback(settings.host):
        return []
    calls = WorkerCalls(killer)
    return [
        web.get(PATH, _local(calls.all)),
        web.get(f"{PATH}/{{id}}", _local(by_id(directory, calls.show))),
        web.post(f"{PATH}/{{id}}/kill", _local(by_id(directory, calls.kill))),
    ]


def is_of_this_server(request: web.BaseRequest) -> bool:
    """Return True if a page of this server, in a browser of this machine, has made the call."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    headers = request.headers
    if not peer or not is_loopback(str(peer[0])) or any(name in headers for name in FORWARDED):
        return False
    # Another name that was made to point to this machine is another site.
    host = headers.get(hdrs.HOST, "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if not is_loopback(name.strip("[]")) or headers.get("Sec-Fetch-Site") != "same-origin":
        return False
    # A browser leaves the origin out of a GET of its own page.
    origin = headers.get(hdrs.ORIGIN)
    return origin == f"http://{host}" if origin is not None else request.method == hdrs.METH_GET


def _local(handler: Handler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if not is_of_this_server(request):
            raise web.HTTPNotFound
        return await handler(request)

    return handle


class WorkerCalls:
    """Handlers of one gateway process."""

    def __init__(self, killer: WorkerKiller) -> None:
        self._killer = killer
        # Incarnations of the workers that were killed: the next worker of the name does not run the answer yet.
        self._killed: set[str] = set()
        self._dialect = ChatDialect()

    async def all(self, request: web.Request) -> web.Response:
        """GET /worker-of: the ids of the workers that can be killed."""
        return web.json_response({"workers": sorted(self._killer.workers)})

    async def show(self, gateway: Gateway, request: web.Request) -> web.Response:
        """GET /worker-of/{id}: the worker of a chat, and the numbers of tokens after which it was resumed."""
        state, owner, history = await self._fields(gateway, request, "state", "owner", "history")
        worker = owner if state == RequestState.RUNNING else None
        # A worker may die before it has added a token to those of the one before.
        places = list(dict.fromkeys(int(claim[1]) for claim in RESUMED.finditer(history)))
        return web.json_response({"worker": worker, "resumed": places})

    async def kill(self, gateway: Gateway, request: web.Request) -> web.Response:
        """POST /worker-of/{id}/kill: kills the worker of a chat with SIGKILL, once the answer has a token."""
        state, worker, incarnation = str(RequestState.QUEUED), "", ""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_WAIT_S):
                while state in (RequestState.QUEUED, RequestState.RUNNING) and not worker:
                    await asyncio.sleep(POLL_S)
                    state, worker, incarnation = await self._progress(gateway, request)
        holder = await gateway.retry(partial(gateway.broker.holder, worker))
        if not worker or incarnation in self._killed or (holder and holder.incarnation != incarnation):
            raise NotKilled("No worker writes this answer now, so none was killed.")
        if not self._killer.kill(worker):
            raise NotKilled(f"Worker {worker} was not started by this `quire serve`, so it was not killed.")
        self._killed.add(incarnation)
        return web.json_response({"worker": worker})

    async def _progress(self, gateway: Gateway, request: web.Request) -> tuple[str, str, str]:
        """Return the state of a chat, its worker if one runs it and it has a token, and the worker's incarnation.

        Raises ApiError.
        """
        state, owner, process, tokens = await self._fields(gateway, request, "state", "owner", "incarnation", "emitted")
        return state, owner if state == RequestState.RUNNING and tokens not in ("", "0") else "", process

    async def _fields(self, gateway: Gateway, request: web.Request, *names: str) -> list[str]:
        """Return what Redis has of a chat of the caller; empty for a field that it lacks. Raises ApiError."""
        call_id, _ = await find(self._dialect, gateway, request)
        broker = gateway.broker
        key = broker.keys.request(call_id)  # a chat has one prompt
        found: list[Any] = await gateway.retry(partial(broker.client.hmget, key, *names))
        return [text(value or b"") for value in found]
