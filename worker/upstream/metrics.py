"""The endpoints of a worker with upstreams for operators: `/metrics` and `/health`. docs/metrics.md has the list."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from aiohttp import web
from prometheus_client.metrics_core import Metric

from quire.shared.telemetry.internal_server import InternalServer, json_response
from quire.shared.telemetry.prometheus import CONTENT_TYPE_LATEST, Exposition, counter, gauge
from quire.worker.queue.metrics import QueueMetrics
from quire.worker.upstream.pool import Upstream, UpstreamPool


class UpstreamAdminServer:
    """Serves the endpoints on a bound socket."""

    def __init__(self, pool: UpstreamPool, listener: socket.socket, queue: QueueMetrics, model: str) -> None:
        self._pool = pool
        self._queue = queue
        self._model = model
        self._exposition = Exposition("worker")
        self.server = InternalServer(listener, {"/metrics": self.metrics, "/health": self.health})

    async def health(self, request: web.Request) -> web.Response:
        """Answer GET /health: 200 while the worker runs, with the reason why an upstream is not usable."""
        reasons = self._pool.reasons
        status = "ok" if self._pool.num_usable else "no upstream"
        return json_response(200, {"status": status, "upstreams": {url: why or "ok" for url, why in reasons.items()}})

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer GET /metrics."""
        text = self._exposition.render([*families(self._pool.upstreams, self._model), *self._queue.families()])
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def families(upstreams: Iterable[Upstream], model: str) -> Iterator[Metric]:
    """Yield the metrics of upstreams. model: its served name."""
    by_url, labels = {one.url: one for one in upstreams}, ("upstream",)
    yield gauge(
        "quire_worker_info",
        "Always 1; the labels say how this worker computes",
        {(model, "upstream"): 1.0},
        ("model", "kernels"),
    )
    yield gauge(
        "quire_upstream_usable",
        "Whether this server of another engine answers and is used",
        {url: float(not one.reason) for url, one in by_url.items()},
        labels,
    )
    yield gauge(
        "quire_upstream_streams",
        "Choices that this server computes now",
        {url: one.num_streams for url, one in by_url.items()},
        labels,
    )
    yield counter(
        "quire_upstream_tokens",
        "Tokens that came from this server",
        {url: one.num_tokens for url, one in by_url.items()},
        labels,
    )
    yield counter(
        "quire_upstream_breaks",
        "Streams of this server that ended before their answers",
        {url: one.num_breaks for url, one in by_url.items()},
        labels,
    )
    yield counter(
        "quire_upstream_continuations",
        "Streams of this server that continued an answer at a later token than the first",
        {url: one.num_continued for url, one in by_url.items()},
        labels,
    )
