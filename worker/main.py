"""Starts a worker process. The last line of a failed start names the fault, its place and a remedy."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from redis.exceptions import RedisError

from quire.shared.config.settings import with_sources
from quire.shared.model.naming import read_aliases, served_name
from quire.shared.process.errors import StartError
from quire.shared.redis.check import check_redis
from quire.shared.redis.url import redact
from quire.shared.telemetry.logs import give_up, setup_logging
from quire.shared.telemetry.tracing import start as start_tracing
from quire.worker.interpreter import leave, settle, without_collections
from quire.worker.lean_torch import import_torch
from quire.worker.progress import BuildProgress, progress
from quire.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from quire.worker.service import WorkerRuntime

log = logging.getLogger(__name__)


def run(settings: WorkerSettings, serve_as: partial[None] | None = None) -> NoReturn:
    """Serve until a signal to stop, and end the process. serve_as: what serves instead of a worker."""
    leave(run_to_the_end(settings, serve_as or partial(serve, settings)))


def run_to_the_end(settings: WorkerSettings, serve_as: partial[None]) -> int:
    """Serve until a signal to stop. Returns the exit code."""
    setup_logging(f"worker {settings.name}", settings.log_level, settings.log_format, worker=settings.name)
    progress.begin()
    reported: tuple[type[Exception], ...] = (RuntimeError,)
    if not settings.upstream and not settings.models_dir:
        reported += import_engine()
    try:
        with closing(progress):
            serve_as()
        return 0
    except StartError as error:
        give_up("quire worker", with_sources(str(error), settings, os.environ))
        return 1
    except RedisError as error:  # at the start; a running worker waits for its Redis
        why = (
            f"the Redis at {redact(settings.redis_url)} cannot hold the queue: {error}. It must be the master, have "
            "free memory, and let its user run all commands on quire:*. Correct that, or give another Redis with "
            "--redis-url (QUIRE_REDIS_URL)."
        )
        give_up("quire worker", with_sources(why, settings, os.environ))
        return 1
    except reported as error:
        # The last line of the log is the error; its traceback is in the log too.
        log.debug("the worker ended because of an error", exc_info=error)
        give_up("quire worker", error)
        return 1
    except KeyboardInterrupt:
        return 0


def import_engine() -> tuple[type[Exception], ...]:
    """Import torch and the engine, which takes seconds. Returns the errors of the engine that a log line explains."""
    progress.phase("importing torch")
    with without_collections():
        import_torch()
        import quire.worker.engine_runtime  # noqa: F401
        from quire import kernels
        from quire.worker.device.out_of_step import OutOfStep

        kernels.report_builds(BuildProgress())
    return (OutOfStep,)


def build_engine_runtime(settings: WorkerSettings, name: str) -> tuple[WorkerRuntime, Path]:
    """Load the model and build the engine. Returns its runtime, and the folder or file of the model."""
    from quire.worker.build import build_engine
    from quire.worker.device.backend import arithmetic_labels
    from quire.worker.engine_runtime import EngineRuntime
    from quire.worker.inspect.fingerprint import of_results
    from quire.worker.models.files.loader import resolve

    started = time.perf_counter()
    engine = build_engine(settings, name)
    model = engine.runner.model
    report = model.self_test_report
    digests = {"weights": model.weights_digest, "results": of_results(engine) or report.digest}
    log.info("model and engine are ready after %.1f s", time.perf_counter() - started)
    log.info("digests, equal in workers that compute alike: weights %(weights)s, results %(results)s", digests)
    runtime = EngineRuntime(
        engine,
        arithmetic_labels(model, model.num_ranks) | digests,
        adapter_folder=Path(settings.lora_dir) if settings.lora_dir else None,
        max_adapter_rank=settings.max_lora_rank,
        num_replaced_kernels=len(report.faults),
    )
    return runtime, resolve(settings.model)


def serve(settings: WorkerSettings) -> None:
    """Build what computes, and run the service around it."""
    import uvloop

    from quire.shared.telemetry.internal_server import bind
    from quire.worker.queue.leases import check_name
    from quire.worker.queue.model_registrar import keep_registered, read_registration
    from quire.worker.service import LeaseTimes, WorkerService
    from quire.worker.upstream.runtime import build_upstream_runtime

    name = served_name(settings.model, settings.served_model_name)
    aliases = read_aliases(settings.model_aliases, name)
    # Wrong settings are found before the weights are loaded, which can take minutes.
    tracer = start_tracing("worker", settings.name, settings.otlp_endpoint, os.environ)
    if tracer is not None:
        log.info("traces go to %s", tracer.url)
    asyncio.run(check_redis(settings.redis_url, name))
    asyncio.run(check_name(settings.redis_url, name, settings.name, settings.beat_s))
    listener = bind(settings.internal_host, settings.internal_port)
    runtime: WorkerRuntime
    try:
        runtime, path = (build_upstream_runtime if settings.upstream else build_engine_runtime)(settings, name)
    except Exception as error:
        progress.fail(str(error) or type(error).__name__)
        raise
    registration = read_registration(path, name, aliases)
    service = WorkerService(
        runtime,
        model_name=name,
        worker_id=settings.name,
        redis_url=settings.redis_url,
        listener=listener,
        leases=LeaseTimes(settings.lease_s, settings.beat_s, settings.watchdog_s, settings.orphan_s),
        tracer=tracer,
        register=partial(keep_registered, settings.redis_url, registration) if registration else None,
    )
    settle()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(service.run(settings.drain_s, settings.park_on_drain_s))
    finally:
        runtime.close()
        if tracer is not None:
            tracer.close()
