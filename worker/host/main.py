"""The door of the model host: serve the models of --models-dir instead of one model."""

from __future__ import annotations

import asyncio

from quire.shared.protocol.keys import REGISTRY_LANE
from quire.shared.redis.check import check_redis
from quire.shared.telemetry.internal_server import bind
from quire.worker.host.host import ModelHost
from quire.worker.settings import WorkerSettings


def serve(settings: WorkerSettings) -> None:
    """Serve until a signal to stop. Raise StartError."""
    import uvloop

    asyncio.run(check_redis(settings.redis_url, REGISTRY_LANE))
    host = ModelHost(settings, bind(settings.internal_host, settings.internal_port))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(host.run())
