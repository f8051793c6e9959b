"""Start of a worker process: a running service, or one line that says what is wrong, where, and the remedy."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import closing
from typing import NoReturn

from redis.exceptions import RedisError

from quire.shared.model.naming import InvalidModelName, served_name
from quire.shared.redis.clients import BrokerUnavailable, check_redis, redact
from quire.shared.settings import with_sources
from quire.shared.telemetry.logs import give_up, setup_logging
from quire.shared.telemetry.tracing import TracingError
from quire.shared.telemetry.tracing import start as start_tracing
from quire.shared.text.tokenizer import ModelError
from quire.worker.errors import WorkerStartError
from quire.worker.interpreter import leave, settle, without_collections
from quire.worker.progress import progress
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def run(settings: WorkerSettings) -> NoReturn:
    """Serve until told to stop, and end the process."""
    leave(run_to_the_end(settings))


def run_to_the_end(settings: WorkerSettings) -> int:
    """Returns the exit code."""
    setup_logging(f"worker {settings.name}", settings.log_level, settings.log_format, worker=settings.name)
    progress.begin()
    progress.phase("importing torch")
    with without_collections():
        # These import torch, which takes seconds: `quire worker --help` must not.
        import quire.worker.service  # noqa: F401
        from quire.worker.models.errors import CheckpointError
        from quire.worker.ranks.leader import OutOfStep

    try:
        with closing(progress):
            serve(settings)
        return 0
    except (WorkerStartError, CheckpointError, ModelError, BrokerUnavailable, InvalidModelName, TracingError) as error:
        give_up("quire worker", with_sources(str(error), settings, os.environ))
        return 1
    except RedisError as error:  # at the start; a running worker waits for its Redis
        why = (
            f"the Redis at {redact(settings.redis_url)} fails where it must hold the queue: {error}. It must be the "
            "master, have memory left, and let its user run all commands on quire:*. Mend that, or give another with "
            "--redis-url (QUIRE_REDIS_URL)."
        )
        give_up("quire worker", with_sources(why, settings, os.environ))
        return 1
    except (RuntimeError, OutOfStep) as error:
        # The traceback is in the log; the last line says what it was.
        log.debug("why the worker ended", exc_info=error)
        give_up("quire worker", error)
        return 1
    except KeyboardInterrupt:
        return 0


def serve(settings: WorkerSettings) -> None:
    """Load the model, build the engine and run the service."""
    import uvloop

    from quire.shared.telemetry.internal_server import PortError, bind
    from quire.worker.build import build_engine
    from quire.worker.device.backend import arithmetic_labels
    from quire.worker.inspect.fingerprint import of_results
    from quire.worker.queue.leases import check_name
    from quire.worker.service import LeaseTimes, WorkerService

    started = time.perf_counter()
    name = served_name(settings.model, settings.served_model_name)
    # What may be wrong is found before minutes may go into loading.
    tracer = start_tracing("worker", settings.name, settings.otlp_endpoint, os.environ)
    if tracer is not None:
        log.info("traces go to %s", tracer.url)
    asyncio.run(check_redis(settings.redis_url, name))
    asyncio.run(check_name(settings.redis_url, name, settings.name, settings.beat_s))
    try:
        listener = bind(settings.internal_host, settings.internal_port)
    except PortError as error:
        raise WorkerStartError(str(error)) from error
    engine = build_engine(settings, name)
    model = engine.runner.model
    digests = {"weights": model.weights_digest, "results": of_results(engine)}
    log.info("model and engine are ready after %.1f s", time.perf_counter() - started)
    log.info("digests, the same in workers that compute alike: weights %(weights)s, results %(results)s", digests)
    service = WorkerService(
        engine,
        model_name=name,
        worker_id=settings.name,
        redis_url=settings.redis_url,
        listener=listener,
        leases=LeaseTimes(settings.lease_s, settings.beat_s, settings.watchdog_s, settings.orphan_s),
        tracer=tracer,
        arithmetic=arithmetic_labels(model, settings.tensor_parallel_size) | digests,
    )
    settle()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(service.run(settings.drain_s))
    finally:
        model.close()
        if tracer is not None:
            tracer.close()
