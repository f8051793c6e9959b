"""The one pub/sub subscription of a gateway: reads step frames and hands their items to the open calls.

What is published while there is no connection is lost without any error. So every subscription after the first makes
every open call compare itself with the output log.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from redis.exceptions import RedisError

from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.cancellation import check_cancelled
from quire.gateway.stream.router import FrameRouter
from quire.shared.messages import MessageError, decode_items
from quire.shared.redis.clients import LaneClient

log = logging.getLogger("gateway")

# A connection over which nothing came for so long is pinged, and given up after as long again: it may be half-open.
PING_AFTER_S = 2.0
# How often the connection is looked at: whether it is silent, and still goes to where the lane is.
LOOK_S = 0.25
RECONNECT_S = (0.05, 1.0)


class Subscription:
    """Subscribed for as long as it runs; `ready` is set while frames arrive."""

    def __init__(self, client: LaneClient, channel: str, fanout: FrameRouter) -> None:
        self._client = client
        self._channel = channel
        self._fanout = fanout
        self._task: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self.ready = asyncio.Event()
        self.lost_at = 0.0  # by the clock of the loop, while it is not ready
        self.subscribes = 0
        self.frames = 0
        self.corrupt = 0

    def start(self) -> None:
        self.lost_at = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._read_forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read_forever(self) -> None:
        pause = RECONNECT_S[0]
        while True:
            try:
                await self._listen()
            except (RedisError, OSError) as error:
                if self.ready.is_set():
                    log.warning("the subscription is broken, connecting again: %s", error)
                    pause = RECONNECT_S[0]
            finally:
                if self.ready.is_set():
                    self.lost_at = asyncio.get_running_loop().time()
                self.ready.clear()
            check_cancelled()
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, RECONNECT_S[1])

    async def _listen(self) -> None:
        """Take what comes, until the connection is closed or seems dead: then raises ConnectionError."""
        loop = asyncio.get_running_loop()
        link = await self._client.open_link()
        try:
            self._heard_at, pinged_at = loop.time(), 0.0
            link.listen(self._on_push)
            link.write("SUBSCRIBE", self._channel)
            while await self._client.is_current(link):
                now = loop.time()
                # Also of the same time: uvloop's clock has milliseconds, and an answer takes less.
                if pinged_at <= self._heard_at:
                    if now - self._heard_at > PING_AFTER_S:
                        pinged_at = now
                        link.write("PING")
                elif now - pinged_at > PING_AFTER_S:
                    raise ConnectionError(f"no answer to a ping within {PING_AFTER_S:g} s")
                await link.wait_closed(LOOK_S)
            raise ConnectionError("the connection was closed")
        finally:
            link.close()

    def _on_push(self, push: Any) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        match push:
            case [b"message", _, frame]:
                self._deliver(frame)
            case [b"subscribe", *_]:
                self._subscribed()

    def _subscribed(self) -> None:
        self.subscribes += 1
        self.ready.set()
        if self.subscribes > 1:
            log.warning(
                "subscribed again: frames may have been lost, %d calls compare with the log", self._fanout.calls
            )
            self._fanout.each(OutputBuffer.suspect)

    def _deliver(self, frame: bytes) -> None:
        self.frames += 1
        try:
            items = list(decode_items(frame))
        except MessageError as error:
            self.corrupt += 1
            if self.corrupt == 1:
                log.error("a published frame is corrupt and was dropped (this is said once): %s", error)
            return
        self._fanout.feed(items, asyncio.get_running_loop().time())
