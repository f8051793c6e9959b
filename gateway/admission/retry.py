"""How long a call waits for Redis: a moment, so that a restart or a failover that is soon over costs no error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quire.gateway.api.errors import BrokerDown
from quire.gateway.stream.subscription import Subscription
from quire.shared.backoff import Backoff

log = logging.getLogger("gateway")

T = TypeVar("T")

# From the moment at which Redis was lost; who comes later than that is refused at once.
PATIENCE_S = 2.0
PAUSE_S = (0.05, 0.4)
# A timeout was long enough by itself, and a refusal need not be for now only: so often, then.
ATTEMPTS = 3


class RetryPolicy:
    """Of the calls of one gateway."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def check_subscribed(self) -> None:
        """Raises BrokerDown while nothing that is emitted would be heard."""
        if self._is_subscribed:
            return
        left_s = self._subscription.lost_at + PATIENCE_S - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s):
                await self._subscription.ready.wait()
        except TimeoutError as error:
            raise down("not connected") from error

    async def __call__(self, command: Callable[[], Awaitable[T]]) -> T:
        """The result of a command that may be made again where its reply was lost. Raises BrokerDown."""
        loop = asyncio.get_running_loop()
        since = loop.time() if self._is_subscribed else self._subscription.lost_at
        until, attempts, backoff = since + PATIENCE_S, 0, Backoff(*PAUSE_S)
        while True:
            try:
                return await command()
            except (RedisError, OSError) as error:
                attempts += 1
                is_late = loop.time() > until
                is_over = is_late or not isinstance(error, RedisConnectionError | OSError)
                # Where the subscription has ended too, Redis is silent.
                if (attempts >= ATTEMPTS and is_over) or (is_late and not self._is_subscribed):
                    raise down(str(error)) from error
            await asyncio.sleep(backoff.next())

    @property
    def _is_subscribed(self) -> bool:
        return self._subscription.ready.is_set()


def down(why: str) -> BrokerDown:
    log.warning("a call is refused, the queue cannot be reached: %s", why)
    return BrokerDown("The queue cannot be reached now. Try again in a moment.", headers={"Retry-After": "2"})
