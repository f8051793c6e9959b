"""Retries of commands about API keys, which belong to no model: a gateway has them before it has a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from quire.gateway.admission.retry import RETRY_S, RetryPolicy
from quire.gateway.errors.api_errors import BrokerDown

T = TypeVar("T")


class AccountRetry:
    """Retries commands as `RetryPolicy` does. After a failure, calls are refused at once until a command succeeds.

    ready: set while the last command succeeded. lost_at: the time on the loop's clock from which RETRY_S is counted.
    """

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.lost_at = 0.0
        self._policy = RetryPolicy(self)

    async def __call__(self, command: Callable[[], Awaitable[T]]) -> T:
        """The result of a command, which must be safe to repeat. Raises BrokerDown."""
        return await self._noted(self._policy(command))

    async def once(self, work: Awaitable[T]) -> T:
        """The result of work that must not be repeated. Raises BrokerDown; then its effect is unknown."""
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
