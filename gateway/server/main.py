"""The gateway as a process: starts, listens, and ends cleanly on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from dataclasses import replace

import uvloop

from quire.gateway.features.admin.internal_server import GatewayAdminServer
from quire.gateway.model.scoring import ScoreSettings
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.server.app import create_app
from quire.gateway.server.http_server import GatewayRunner, start_site
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway, GatewayProcess
from quire.gateway.settings import GatewaySettings
from quire.shared.config.settings import with_sources
from quire.shared.process.errors import StartError
from quire.shared.process.start_pipe import report_ready
from quire.shared.protocol.broker import new_id
from quire.shared.protocol.keys import REGISTRY_LANE
from quire.shared.redis.check import check_redis
from quire.shared.redis.url import redact
from quire.shared.telemetry.internal_server import bind
from quire.shared.telemetry.logs import give_up, setup_logging
from quire.shared.telemetry.tracing import start as start_tracing

log = logging.getLogger("gateway")

# Allocations between two garbage collections. A published step of 256 requests makes some thousands of objects, none of
# them in cycles; with Python's default of 700 the collector would run a few times per step.
GC_THRESHOLD = 20_000


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0, or 1 after one line that says why it cannot start."""
    settings = replace(settings, gateway_id=settings.gateway_id or new_id())
    setup_logging(
        "gateway",
        settings.log_level,
        settings.log_format,
        hides_errors=not settings.log_prompts,
        gateway=settings.gateway_id,
    )
    try:
        uvloop.run(serve(settings))
    except StartError as error:
        give_up("quire gateway", with_sources(str(error), settings, os.environ))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    with bind(settings.internal_host, settings.internal_port) as listener:
        await _serve(settings, listener)


async def _serve(settings: GatewaySettings, listener: socket.socket) -> None:
    model = None if settings.discover_models else await asyncio.to_thread(_load, settings)
    tracer = start_tracing("gateway", settings.gateway_id, settings.otlp_endpoint, os.environ)
    server = await check_redis(settings.redis_url, model.name if model else REGISTRY_LANE)
    if model is not None:
        settings = settings.with_body_bytes(takes_images=model.layout is not None)
    process = GatewayProcess(settings, tracer)
    await process.keys.check_start()
    directory = ModelDirectory(process, Gateway(settings, model, process=process) if model else None)
    runner = GatewayRunner(create_app(directory))
    await runner.setup()
    internal = GatewayAdminServer(directory, listener).server
    try:
        await internal.start()
        stop: asyncio.Future[int] = asyncio.Future()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _tell, stop, number)
        port = await _listen(runner, settings)
        what = model.name if model else "every model that workers register"
        log.info("serving %s through %s at %s", what, server, redact(settings.redis_url))
        log.info("listening on http://%s:%d", f"[{settings.host}]" if ":" in settings.host else settings.host, port)
        log.info("for operators: %s%s", internal.url, internal.paths)
        if tracer is not None:
            log.info("traces go to %s", tracer.url)
        report_ready(os.environ)
        # All objects of the start live as long as the process: exempt them from garbage collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        told = await stop
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends at once
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        process.is_leaving = True
        if told == signal.SIGTERM and settings.shutdown_delay_s:
            log.info("not ready any more; new calls are accepted for %g s", settings.shutdown_delay_s)
            await asyncio.sleep(settings.shutdown_delay_s)
        log.info("ending; open streams get %g s", settings.drain_s)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
            await internal.close()
        if tracer is not None:
            tracer.close()


def _tell(stop: asyncio.Future[int], number: int) -> None:
    if not stop.done():
        stop.set_result(number)


def _load(settings: GatewaySettings) -> ServedModel:
    return load_model(
        settings.model,
        settings.name,
        settings.generation_config == "auto",
        settings.tool_call_format,
        settings.reasoning_format,
        settings.aliases,
        ScoreSettings(settings.score_texts, settings.score_template),
    )


async def _listen(runner: GatewayRunner, settings: GatewaySettings) -> int:
    try:
        return await start_site(runner, settings.host, settings.port, settings.reuse_port)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StartError(
            f"cannot listen on {settings.host} port {settings.port}: {why}; choose another with --port (QUIRE_PORT) or "
            "--host (QUIRE_HOST), or stop what uses it."
        ) from error
