"""What somebody who looks at `/engine` sees of a worker: views that the worker publishes, as server-sent events.

A gateway needs no route to a worker. While it has viewers it asks for views with a key that expires; all viewers of a
worker share one subscription. The newest view wins: who reads slowly misses some, and holds nobody up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from base64 import b64encode
from typing import Any

from aiohttp import web
from redis.exceptions import RedisError

from gateway import sse
from gateway.cancellation import check_cancelled
from gateway.errors import ApiError, InvalidRequest, NotFound
from gateway.service import Gateway
from shared.broker import VIEW_TTL_S, Broker
from shared.messages import MessageError
from shared.redis_clients import pubsub_client
from shared.views import View

log = logging.getLogger("gateway")

# Open streams of one gateway.
MAX_VIEWERS = 64
# How often we ask again for what we want to see.
ASK_S = VIEW_TTL_S / 3
RETRY_S = 0.5


class TooManyViewers(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_viewers"


class Viewer:
    """One who looks: the newest event that was not sent yet, if there is one."""

    def __init__(self) -> None:
        self._latest: bytes | None = None
        self._there = asyncio.Event()
        self.skipped = 0
        self.is_over = False

    def show(self, event: bytes) -> None:
        self.skipped += self._latest is not None
        self._latest = event
        self._there.set()

    def end(self) -> None:
        self.is_over = True
        self._there.set()

    async def next(self) -> bytes | None:
        """The newest event once there is a new one; None at the end."""
        await self._there.wait()
        self._there.clear()
        latest, self._latest = self._latest, None
        return None if self.is_over else latest


class Watch:
    """One worker that is looked at."""

    def __init__(self, redis_url: str, broker: Broker, worker_id: str) -> None:
        self._redis_url = redis_url
        self._broker = broker
        self._worker_id = worker_id
        self._queues: dict[str, int] = {}
        self.viewers: set[Viewer] = set()
        self.corrupt = 0
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        client = pubsub_client(self._redis_url)
        try:
            while True:
                pubsub = client.pubsub()
                try:
                    await pubsub.subscribe(self._broker.keys.view(self._worker_id))
                    await self._follow(pubsub)
                except (RedisError, OSError) as error:
                    log.warning("views of worker %s are interrupted: %s", self._worker_id, error)
                finally:
                    with contextlib.suppress(RedisError, OSError):
                        await pubsub.aclose()  # type: ignore[no-untyped-call]
                check_cancelled()
                await asyncio.sleep(RETRY_S)
        finally:
            await client.aclose()

    async def _follow(self, pubsub: Any) -> None:
        loop = asyncio.get_running_loop()
        asks_at = loop.time()
        while True:
            if loop.time() >= asks_at:
                asks_at = loop.time() + ASK_S
                self._queues = await self._broker.look(self._worker_id)
            message = await pubsub.get_message(timeout=max(0.001, asks_at - loop.time()))
            check_cancelled()
            if message is not None and message["type"] == "message":
                self._show(message["data"])

    def _show(self, data: bytes) -> None:
        try:
            event = render(View.decode(data), self._queues)
        except MessageError as error:
            self.corrupt += 1
            if self.corrupt == 1:
                log.error("a view of worker %s is corrupt (this is said once): %s", self._worker_id, error)
            return
        for viewer in self.viewers:
            viewer.show(event)


class EngineView:
    """The streams of one gateway and what they look at."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._is_closing = False
        self.watches: dict[str, Watch] = {}

    async def workers(self, request: web.Request) -> web.Response:
        """GET /engine/workers: the live workers."""
        fleet = self._gateway.fleet
        workers = [
            {
                "id": card.worker_id,
                "running": card.running,
                "waiting": card.waiting,
                "free_blocks": card.free_blocks,
                "total_blocks": card.total_blocks,
                "block_size": card.block_size,
                "max_model_len": card.max_model_len,
                "max_num_seqs": card.max_num_seqs,
            }
            for card in sorted(fleet.workers, key=lambda card: card.worker_id)
        ]
        return web.json_response({"model": self._gateway.model.name, "workers": workers})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /engine/stream?worker=ID: views of a worker as they come, for as long as the client reads."""
        worker_id = self._read_worker(request)
        if self._is_closing:
            raise ApiError("This gateway is shutting down.", code="shutting_down")
        if sum(len(watch.viewers) for watch in self.watches.values()) >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} look at engines through this gateway already; close one, or wait.")
        watch = self.watches.get(worker_id)
        if watch is None:
            watch = Watch(self._gateway.settings.redis_url, self._gateway.broker, worker_id)
            self.watches[worker_id] = watch
        viewer = Viewer()
        watch.viewers.add(viewer)
        response = web.StreamResponse(headers=sse.HEADERS)
        try:
            await response.prepare(request)
            await self._send(request, response, viewer)
        finally:
            watch.viewers.discard(viewer)
            if not watch.viewers and self.watches.get(worker_id) is watch:
                del self.watches[worker_id]
                await watch.close()
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, viewer: Viewer) -> None:
        settings = self._gateway.settings
        with contextlib.suppress(ConnectionError):
            while True:
                try:
                    async with asyncio.timeout(settings.keepalive_s):
                        event = await viewer.next()
                except TimeoutError:
                    event = sse.KEEPALIVE
                if event is None:
                    return
                try:
                    async with asyncio.timeout(settings.write_timeout_s):
                        await response.write(event)
                except TimeoutError:
                    # It counts no longer, so it must not keep its connection, nor what is buffered there.
                    if request.transport is not None:
                        request.transport.abort()
                    return

    def _read_worker(self, request: web.Request) -> str:
        unknown = sorted(request.query.keys() - {"worker"})
        if unknown:
            raise InvalidRequest(f"{unknown[0][:80]!r} is no parameter of {request.path}; it has worker.")
        live = sorted(card.worker_id for card in self._gateway.fleet.workers)
        worker_id: str = request.query.get("worker", live[0] if live else "")
        if worker_id not in live:
            there = f"there are {', '.join(live[:8])}" if live else "there is none now"
            raise NotFound(f"No live worker has the id {worker_id[:80]!r}; {there}.", param="worker")
        return worker_id

    async def close(self, app: web.Application) -> None:
        """End all streams: what they show can be had from another gateway."""
        self._is_closing = True
        for watch in self.watches.values():
            for viewer in watch.viewers:
                viewer.end()


def render(view: View, queues: dict[str, int]) -> bytes:
    """A view as an event; what is packed stays so, in base64."""
    value = {
        "worker": view.worker,
        "number": view.number,
        "limits": view.limits._asdict(),
        "figures": view.figures,
        "cells": {name: _base64(column) for name, column in view.cells._asdict().items()},
        "hidden_cells": view.hidden_cells,
        "sequences": [{**one._asdict(), "table": _base64(one.table)} for one in view.sequences],
        "hidden_sequences": view.hidden_sequences,
        "batch": [one._asdict() for one in view.batch],
        "hidden_rows": view.hidden_rows,
        "steps": view.steps,
        "moves": [move._asdict() for move in view.moves],
        "hidden_moves": view.hidden_moves,
        "queues": queues,
    }
    return sse.event(json.dumps(value, separators=(",", ":"))).encode()


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
