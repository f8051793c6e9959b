"""The memory of a message that a WebSocket has received in part.

aiohttp keeps the parts until the message is complete. A large one counts in the budget of bodies meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import WSCloseCode, web
from aiohttp.base_protocol import BaseProtocol

from quire.gateway.api.body_budget import BODIES, caller_name
from quire.gateway.errors.api_errors import ServerBusy

# Bytes of a message that do not count, as those of a body in the buffers of its connection.
UNCOUNTED = 128 * 1024


class IncomingMessage:
    """Counts what arrives of one connection. At most `limit` bytes belong to a message."""

    def __init__(
        self, request: web.Request, limit: int, timeout_s: float, refuse: Callable[[int, str], Awaitable[None]]
    ) -> None:
        """refuse: closes the connection with a code and a reason."""
        self._budget = request.app[BODIES]
        self._name = caller_name(request)
        self._protocol: BaseProtocol = request.protocol
        self._limit, self._timeout_s, self._refuse = limit, timeout_s, refuse
        self._arrived = 0
        self._held = 0
        self._holding: asyncio.Task[None] | None = None

    def add(self, size: int) -> None:
        """Count bytes that have arrived."""
        self._arrived += size
        if self._arrived > UNCOUNTED and self._holding is None:
            self._protocol.pause_reading()
            self._holding = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        try:
            await self._budget.take(self._name, self._limit, self._timeout_s)
            self._held = self._limit
        except ServerBusy as error:
            await self._refuse(WSCloseCode.TRY_AGAIN_LATER, error.message)
            return
        finally:
            self._protocol.resume_reading()
        await asyncio.sleep(self._timeout_s)
        await self._refuse(
            WSCloseCode.POLICY_VIOLATION, f"The message did not arrive within {self._timeout_s:g} seconds."
        )

    def complete(self) -> None:
        """Give back the memory: the message is complete, or the connection is closed."""
        self._arrived = 0
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        if self._held:
            held, self._held = self._held, 0
            self._budget.give_back(self._name, held)
