"""The inside of a gateway, for operators: `/metrics` and `/health`."""

from __future__ import annotations

import socket

from aiohttp import web

from quire.gateway.service import Gateway
from quire.shared.telemetry.internal_server import InternalServer, json_response
from quire.shared.telemetry.prometheus import CONTENT_TYPE_LATEST


class GatewayAdminServer:
    """Serves one gateway's inside on a bound socket. The gateway has started."""

    def __init__(self, gateway: Gateway, listener: socket.socket) -> None:
        self._gateway = gateway
        self.server = InternalServer(listener, {"/metrics": self.metrics, "/health": self.health})

    async def metrics(self, request: web.Request) -> web.Response:
        text = await self._gateway.metrics.render()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def health(self, request: web.Request) -> web.Response:
        """200 while Redis answers and the workers' output is heard, with workers or without."""
        problems = self._gateway.redis_problems()
        if problems:
            return json_response(503, {"status": "unavailable", "reason": "; ".join(problems)})
        return json_response(200, {"status": "ok", "workers": len(self._gateway.fleet.workers)})
