"""The views that workers publish, as server-sent events for viewers of `/engine`.

A gateway needs no route to a worker. While it has viewers it asks for views with a key that expires; all viewers of a
worker share one subscription. The newest view wins: a slow reader misses some, and delays no other reader.

A viewer may follow a request, named by its idempotency key, to the worker that claims it. The request may end within
half a second, so the gateway subscribes to all workers while it has a viewer: the worker's views are there already.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from base64 import b64encode
from typing import Any

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.api.errors import ApiError, InvalidRequest, NotFound
from quire.gateway.service import Gateway
from quire.gateway.stream import sse
from quire.shared.broker import BEAT_S, VIEW_TTL_S, Broker
from quire.shared.messages import MessageError
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.redis.clients import pubsub_client
from quire.shared.views import View

log = logging.getLogger("gateway")

# Open streams of one gateway.
MAX_VIEWERS = 64
# Time between two requests to a worker for its views.
ASK_S = VIEW_TTL_S / 3
RETRY_S = 0.5
# Workers whose views a gateway receives although none of its viewers looks at them.
MAX_SPARE = 8
# Time between two look-ups of a followed request before a worker has claimed it, and after: another may take it over.
CLAIM_S = 0.03
TAKEOVER_S = 0.5
# A request that is still unknown after this time was refused, or never sent.
UNKNOWN_S = 60.0

_KEY = re.compile(r"[!-~]{1,255}", re.ASCII)


class TooManyViewers(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_viewers"


class EngineViewer:
    """One reader of a stream: the newest events that were not sent yet, one of each kind."""

    def __init__(self) -> None:
        self._claim: bytes | None = None
        self._latest: bytes | None = None
        self._there = asyncio.Event()
        self.skipped = 0
        self.is_over = False

    def show(self, event: bytes) -> None:
        """Send a view, unless a newer one comes before the client reads."""
        self.skipped += self._latest is not None
        self._latest = event
        self._there.set()

    def tell(self, event: bytes) -> None:
        """Send which worker has the followed request. Views that were not sent yet are of another worker: drop them."""
        self._claim, self._latest = event, None
        self._there.set()

    def end(self) -> None:
        self.is_over = True
        self._there.set()

    async def next(self) -> bytes | None:
        """The newest events once there is a new one; None at the end."""
        await self._there.wait()
        self._there.clear()
        events = (self._claim or b"") + (self._latest or b"")
        self._claim = self._latest = None
        return None if self.is_over else events


class ViewSubscription:
    """The subscription to the views of one worker."""

    def __init__(self, redis_url: str, broker: Broker, worker_id: str) -> None:
        self._redis_url = redis_url
        self._broker = broker
        self._worker_id = worker_id
        self._queues: dict[str, int] = {}
        self._latest: bytes | None = None
        self.viewers: set[EngineViewer] = set()
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

    def add(self, viewer: EngineViewer) -> None:
        """Show the views to a viewer, beginning with the newest one that came already."""
        self.viewers.add(viewer)
        if self._latest is not None and (event := self._event(self._latest)):
            viewer.show(event)

    def _show(self, data: bytes) -> None:
        self._latest = data
        if self.viewers and (event := self._event(data)):
            for viewer in self.viewers:
                viewer.show(event)

    def _event(self, data: bytes) -> bytes | None:
        try:
            return render(View.decode(data), self._queues)
        except MessageError as error:
            self.corrupt += 1
            if self.corrupt == 1:
                log.error("a view of worker %s is corrupt (this is said once): %s", self._worker_id, error)
            return None


class EngineView:
    """The streams of one gateway, and the workers to which it subscribes for them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._is_closing = False
        self._keeper: asyncio.Task[None] | None = None
        self.watches: dict[str, ViewSubscription] = {}

    async def workers(self, request: web.Request) -> web.Response:
        """GET /engine/workers: the live workers."""
        fleet = self._gateway.worker_registry
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
        """GET /engine/stream?worker=ID&follow=KEY: views of a worker as they come, for as long as the client reads.

        With `follow`, an idempotency key: of the worker that has claimed the request of this key, as soon as one has.
        """
        worker_id, key = self._read_worker(request), _read_key(request)
        if self._is_closing:
            raise ApiError("This gateway is shutting down.", code="shutting_down")
        if self.num_viewers >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} look at engines through this gateway already; close one, or wait.")
        viewer = EngineViewer()
        self._watch(worker_id).add(viewer)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        follower = asyncio.create_task(self._follow(viewer, key)) if key else None
        response = web.StreamResponse(headers=sse.HEADERS)
        try:
            await response.prepare(request)
            await self._send(request, response, viewer)
        finally:
            if follower is not None:
                follower.cancel()
                await asyncio.gather(follower, return_exceptions=True)
            for watch in self.watches.values():
                watch.viewers.discard(viewer)
            if not self.num_viewers:
                await self._leave()
        return response

    @property
    def num_viewers(self) -> int:
        return sum(len(watch.viewers) for watch in self.watches.values())

    def _watch(self, worker_id: str) -> ViewSubscription:
        watch = self.watches.get(worker_id)
        if watch is None:
            watch = ViewSubscription(self._gateway.settings.redis_url, self._gateway.broker, worker_id)
            self.watches[worker_id] = watch
        return watch

    async def _keep(self) -> None:
        """While there are viewers: subscribe to workers that start, and leave those that are gone."""
        while True:
            live = [card.worker_id for card in self._gateway.worker_registry.workers]
            gone = [(id_, watch) for id_, watch in self.watches.items() if not watch.viewers and id_ not in live]
            for worker_id, _ in gone:
                del self.watches[worker_id]
            num_spare = sum(not watch.viewers for watch in self.watches.values())
            new = [worker_id for worker_id in live if worker_id not in self.watches]
            for worker_id in new[: max(0, MAX_SPARE - num_spare)]:
                self._watch(worker_id)
            for _, watch in gone:
                await watch.close()
            await asyncio.sleep(BEAT_S)

    async def _leave(self) -> None:
        """The last viewer is gone: end all subscriptions."""
        watches, self.watches = self.watches, {}
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await asyncio.gather(*(watch.close() for watch in watches.values()))

    async def _follow(self, viewer: EngineViewer, key: str) -> None:
        """Move a viewer to the worker that has the request of an idempotency key, and to any that takes it over."""
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + UNKNOWN_S
        current = ""
        while True:
            try:
                state, owner = await self._gateway.broker.owner(key)
            except (RedisError, OSError) as error:
                log.debug("the worker of a followed request cannot be looked up now: %s", error)
                state, owner = "", ""
            check_cancelled()
            if owner and owner != current:
                current = owner
                for watch in self.watches.values():
                    watch.viewers.discard(viewer)
                claim = sse.event(json.dumps({"follow": key, "worker": owner}))
                viewer.tell(f"event: claimed\n{claim}".encode())
                self._watch(owner).add(viewer)
            if state == "done" or (not state and loop.time() > gives_up_at):
                return
            await asyncio.sleep(TAKEOVER_S if current else CLAIM_S)

    async def _send(self, request: web.Request, response: web.StreamResponse, viewer: EngineViewer) -> None:
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
        unknown = sorted(request.query.keys() - {"worker", "follow"})
        if unknown:
            raise InvalidRequest(f"{unknown[0][:80]!r} is no parameter of {request.path}; it has worker and follow.")
        live = sorted(card.worker_id for card in self._gateway.worker_registry.workers)
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


def _read_key(request: web.Request) -> str:
    """The idempotency key of the request to follow; empty for none. Raises InvalidRequest."""
    key: str = request.query.get("follow", "")
    if key and not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"follow must be an Idempotency-Key of 1 to 255 visible ASCII characters, not {key[:80]!r}.", param="follow"
        )
    return key


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
