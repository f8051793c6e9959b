"""The admin server of a gateway: `/metrics` and `/health`, for operators."""

from __future__ import annotations

import socket

from aiohttp import web

from quire.gateway.features.admin.metrics import GatewayMetrics
from quire.gateway.serving.model_directory import ModelDirectory
from quire.shared.telemetry.internal_server import InternalServer, json_response
from quire.shared.telemetry.prometheus import CONTENT_TYPE_LATEST


class GatewayAdminServer:
    """Serves the admin endpoints of one started gateway process on a bound socket."""

    def __init__(self, directory: ModelDirectory, listener: socket.socket) -> None:
        self._directory = directory
        self._metrics = GatewayMetrics(directory)
        self.server = InternalServer(listener, {"/metrics": self.metrics, "/health": self.health})

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics: the metrics for Prometheus."""
        text = await self._metrics.render()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 while Redis answers and the subscription holds, with workers or without."""
        problems = self._directory.redis_problems()
        if problems:
            return json_response(503, {"status": "unavailable", "reason": "; ".join(problems)})
        workers = sum(len(gateway.worker_registry.workers) for gateway in self._directory.gateways)
        return json_response(200, {"status": "ok", "workers": workers})
