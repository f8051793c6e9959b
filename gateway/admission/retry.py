"""Retries of commands to Redis: a restart or a failover that is soon over costs a moment, and no error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quire.gateway.errors.api_errors import BrokerDown
from quire.shared.process.backoff import Backoff

log = logging.getLogger("gateway")

T = TypeVar("T")

# Commands are retried for this long after the connection was lost; later calls are refused at once.
RETRY_S = 2.0
PAUSE_S = (0.05, 0.4)
# Timeouts and refusals by Redis are retried at most this often: a timeout is long, and a refusal may be lasting.
ATTEMPTS = 3


class Connected(Protocol):
    """The connection to Redis. ready: set while Redis answers. lost_at: when it last ceased, on the loop's clock."""

    ready: asyncio.Event
    lost_at: float


class RetryPolicy:
    """Retries commands with backoff."""

    def __init__(self, subscription: Connected) -> None:
        self._subscription = subscription

    async def check_subscribed(self) -> None:
        """Wait for the subscription to the workers' output. Raises BrokerDown if it does not come back soon."""
        if self._is_subscribed:
            return
        left_s = self._subscription.lost_at + RETRY_S - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s):
                await self._subscription.ready.wait()
        except TimeoutError as error:
            raise down("not connected") from error

    async def __call__(self, command: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a command, which must be safe to repeat: its reply may be lost. Raises BrokerDown."""
        loop = asyncio.get_running_loop()
        since = loop.time() if self._is_subscribed else self._subscription.lost_at
        until, attempts, backoff = since + RETRY_S, 0, Backoff(*PAUSE_S)
        while True:
            try:
                return await command()
            except (RedisError, OSError) as error:
                attempts += 1
                is_late = loop.time() > until
                is_over = is_late or not isinstance(error, RedisConnectionError | OSError)
                # If the subscription has ended as well, Redis itself is away.
                if (attempts >= ATTEMPTS and is_over) or (is_late and not self._is_subscribed):
                    raise down(str(error)) from error
            await asyncio.sleep(backoff.next())

    async def once(self, work: Awaitable[T]) -> T:
        """Return the result of work that must not be repeated. Raises BrokerDown; then its effect is unknown."""
        try:
            return await work
        except (RedisError, OSError) as error:
            raise down(str(error)) from error

    @property
    def _is_subscribed(self) -> bool:
        return self._subscription.ready.is_set()


class AccountRetry:
    """Retries commands about API keys and files, which belong to no model: a gateway has them before it has a model.

    It retries as `RetryPolicy` does. After a failure, calls are refused at once until a command succeeds.

    ready: set while the last command succeeded. lost_at: the time on the loop's clock from which RETRY_S is counted.
    """

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.lost_at = 0.0
        self._policy = RetryPolicy(self)

    async def __call__(self, command: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a command, which must be safe to repeat. Raises BrokerDown."""
        return await self._noted(self._policy(command))

    async def once(self, work: Awaitable[T]) -> T:
        """Return the result of work that must not be repeated. Raises BrokerDown; then its effect is unknown."""
        return await self._noted(self._policy.once(work))

    async def _noted(self, work: Awaitable[T]) -> T:
        try:
            result = await work
        except BrokerDown:
            self.ready.clear()
            self.lost_at = asyncio.get_running_loop().time() - RETRY_S
            raise
        self.ready.set()
        return result


def down(why: str) -> BrokerDown:
    """Return the error for a queue that cannot be reached; the log has the reason."""
    log.warning("a call is refused, the queue cannot be reached: %s", why)
    return BrokerDown("The queue cannot be reached now. Try again in a moment.", headers={"Retry-After": "2"})
