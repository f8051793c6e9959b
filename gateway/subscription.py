"""The one pub/sub subscription of a gateway: reads step frames and hands their items to the open calls.

Messages can be lost without any error (a connection that was cut and silently made again), and the only sign is a
second `subscribe` message. So each of them makes every open call compare itself with the output log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from gateway.cancellation import check_cancelled
from gateway.fanout import Fanout
from gateway.outputs import Outputs
from shared.messages import MessageError, decode_items

log = logging.getLogger("gateway")

# A connection over which nothing came for so long is pinged, and given up after as long again: it may be half-open.
PING_AFTER_S = 2.0
RECONNECT_S = (0.05, 1.0)


class Subscription:
    """Subscribed for as long as it runs; `ready` is set while frames arrive."""

    def __init__(self, client: Redis, channel: str, fanout: Fanout) -> None:
        self._client = client
        self._channel = channel
        self._fanout = fanout
        self._task: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()
        self.subscribes = 0
        self.frames = 0
        self.corrupt = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._read_forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read_forever(self) -> None:
        pause = RECONNECT_S[0]
        while True:
            pubsub = self._client.pubsub()
            try:
                await pubsub.subscribe(self._channel)
                while True:
                    await self._read(pubsub)
                    check_cancelled()
                    pause = RECONNECT_S[0]
            except (RedisError, OSError) as error:
                if self.ready.is_set():
                    log.warning("the subscription is broken, connecting again: %s", error)
            finally:
                self.ready.clear()
                with contextlib.suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
            check_cancelled()
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, RECONNECT_S[1])

    async def _read(self, pubsub: PubSub) -> None:
        """Wait for one message and deal with it. Raises ConnectionError when the connection seems dead."""
        message = await pubsub.get_message(timeout=PING_AFTER_S)
        if message is None:
            await pubsub.ping()
            message = await pubsub.get_message(timeout=PING_AFTER_S)
            if message is None:
                raise ConnectionError(f"no answer to a ping within {PING_AFTER_S:g} s")
        if message["type"] == "message":
            self._deliver(message["data"])
        elif message["type"] == "subscribe":
            self._subscribed()

    def _subscribed(self) -> None:
        self.subscribes += 1
        self.ready.set()
        if self.subscribes > 1:
            log.warning(
                "subscribed again: frames may have been lost, %d calls compare with the log", self._fanout.calls
            )
            self._fanout.each(Outputs.suspect)

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
