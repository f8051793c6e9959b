"""`quire worker --canary`: scores a share of the model's ended requests with an engine of its own.

A canary only reads from Redis: it is no worker for gateways, claims nothing and holds no prefix. It logs no tokens.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress

import uvloop
from aiohttp import web
from prometheus_client.metrics_core import Metric
from redis.exceptions import RedisError

from quire.shared.model.naming import served_name
from quire.shared.process.errors import StartError
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.broker import Broker
from quire.shared.redis.check import check_redis
from quire.shared.redis.clients import command_client, pubsub_client
from quire.shared.telemetry.internal_server import InternalServer, bind, json_response
from quire.shared.telemetry.prometheus import (
    CONTENT_TYPE_LATEST,
    WAIT_S,
    Exposition,
    Histogram,
    counter,
    gauge,
    histogram,
)
from quire.worker.build import build_engine
from quire.worker.device.backend import arithmetic_labels
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.replay import Replay
from quire.worker.engine.limits import RequestRefused
from quire.worker.interpreter import settle
from quire.worker.progress import progress
from quire.worker.replay.commands import WorkerCommandSettings
from quire.worker.replay.ended_requests import EndedRequests
from quire.worker.replay.logged_request import CannotReplay, LoggedRequest, read_logged

log = logging.getLogger(__name__)

# Upper bounds of buckets, in nats.
DIVERGENCES = (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
MARGINS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
# Why a sampled request is not scored.
REASONS = ("behind", "gone", "not_kept", "no_tokens", "ranked", "refused", "corrupt", "failed", "redis")
# Pause after a read that Redis did not answer.
RETRY_S = 1.0


class Scores:
    """What a canary has counted. requests: by result, tokens: by result, skipped: requests by reason.

    margins, divergences: see `Replay`.
    """

    def __init__(self) -> None:
        self.requests = dict.fromkeys(("exact", "different"), 0)
        self.tokens = dict.fromkeys(("equal", "different"), 0)
        self.skipped = Counter(dict.fromkeys(REASONS, 0))
        self.margins = Histogram(MARGINS)
        self.divergences = Histogram(DIVERGENCES)
        self.seconds = Histogram(WAIT_S)

    def add(self, replays: list[Replay], seconds: float) -> None:
        """Count a request. replays: of its choices."""
        is_exact = all(replay.difference is None for replay in replays)
        self.requests["exact" if is_exact else "different"] += 1
        for replay in replays:
            self.tokens["equal"] += replay.num_equal
            self.tokens["different"] += replay.num_compared - replay.num_equal
            for margin in replay.margins:
                self.margins.observe(margin)
            for divergence in replay.divergences:
                self.divergences.observe(divergence)
        self.seconds.observe(seconds)

    def families(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield counter("quire_canary_requests", "Requests that were scored, by result", self.requests, ("result",))
        yield counter("quire_canary_skipped", "Sampled requests without a score, by reason", self.skipped, ("reason",))
        yield counter("quire_canary_tokens", "Tokens that were chosen again, by result", self.tokens, ("result",))
        yield histogram(
            "quire_canary_margin_nats",
            "Difference of the log-probabilities of the chosen and of the logged token, where they differ",
            self.margins,
        )
        yield histogram(
            "quire_canary_divergence_nats",
            "Lower bound of the divergence from the logged distribution to that of the canary, of tokens whose "
            "log-probabilities are logged",
            self.divergences,
        )
        yield histogram("quire_canary_seconds", "Time to score a request", self.seconds)


class Canary:
    """Scores the requests of one lane until `stop`. `listener`: a bound socket for its internal endpoints."""

    def __init__(
        self,
        engine: Engine,
        info: Mapping[str, str],
        *,
        model_name: str,
        redis_url: str,
        share: float,
        listener: socket.socket | None = None,
    ) -> None:
        """info: labels that say how the engine computes."""
        self._engine = engine
        self._broker = Broker(command_client(redis_url, model_name, connections=2), model_name)
        self._pubsub = pubsub_client(redis_url, model_name)
        self.ended = EndedRequests(self._pubsub, self._broker.keys.endings, share)
        self.scores = Scores()
        self._constant = [
            gauge(
                "quire_canary_info",
                "Always 1; the labels say how this canary computes",
                {(*info.values(),): 1.0},
                (*info,),
            ),
            gauge("quire_canary_share", "Share of the ended requests that this canary samples", share),
        ]
        self._exposition = Exposition("canary")
        self._stop = asyncio.Event()
        self._internal = None
        if listener is not None:
            self._internal = InternalServer(listener, {"/metrics": self._metrics, "/health": self._health})

    def stop(self) -> None:
        """Ask `run` to end after the step in progress."""
        self._stop.set()

    async def run(self) -> None:
        """Score until `stop`, SIGTERM or SIGINT. Raises the error of a lost device."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        tasks = [asyncio.create_task(run) for run in (self.ended.run(), self._score_forever(), self._stop.wait())]
        try:
            if self._internal:
                await self._internal.start()
                log.info("for operators: %s%s", self._internal.url, self._internal.paths)
            progress.ready()
            log.info("ready: a canary scores requests of %s", self._broker.keys.lane)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.stop()
            await end_tasks(*tasks)
            if self._internal:
                await self._internal.close()
            for client in (self._broker.client, self._pubsub):
                await client.aclose()

    async def _score_forever(self) -> None:
        while not self._stop.is_set():
            request_id = await self.ended.next()
            try:
                logged = await read_logged(self._broker, request_id)
                self._count(request_id, await asyncio.to_thread(self._score, logged))
            except CannotReplay as error:
                self.scores.skipped[error.why] += 1
            except RequestRefused:
                self.scores.skipped["refused"] += 1
            except (RedisError, OSError) as error:
                self.scores.skipped["redis"] += 1
                log.warning("Redis did not answer: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), RETRY_S)

    def _score(self, logged: LoggedRequest) -> tuple[list[Replay], float]:
        """Replay the choices of a request. Returns them, and the time that it took. Raises RequestRefused."""
        began, request, replays = time.perf_counter(), logged.request, list[Replay]()
        try:
            for choice in logged.deltas:
                replays.append(
                    Replay(self._engine, request, choice, logged.output(choice), logged.logprobs(choice), logged.files)
                )
                replays[-1].start()
                while self._engine.has_work and not self._stop.is_set():
                    self._engine.step()
        except RequestRefused:
            raise
        except Exception as error:
            self._engine.fail("")
            # Raises if the device is lost: the canary ends.
            self._engine.runner.check()
            # The text of the error may have tokens.
            log.error("request %s cannot be scored: %s", request.id, type(error).__name__)
            raise CannotReplay("a step failed") from error
        return replays, time.perf_counter() - began

    def _count(self, request_id: str, scored: tuple[list[Replay], float]) -> None:
        replays, seconds = scored
        if self._stop.is_set():
            return
        self.scores.add(replays, seconds)
        log.debug(
            "request %s: %d of %d tokens are equal",
            request_id,
            sum(one.num_equal for one in replays),
            sum(one.num_compared for one in replays),
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        """Answer GET /metrics."""
        self.scores.skipped["behind"] = self.ended.num_passed_over
        waiting = gauge("quire_canary_waiting", "Sampled requests that wait to be scored", len(self.ended))
        text = self._exposition.render([*self._constant, waiting, *self.scores.families()])
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: web.Request) -> web.Response:
        """Answer GET /health: 200 while the canary is subscribed."""
        if not self.ended.is_subscribed:
            return json_response(503, {"status": "unavailable", "reason": "Redis does not answer"})
        return json_response(200, {"status": "ok", "scored": sum(self.scores.requests.values())})


def serve(settings: WorkerCommandSettings) -> None:
    """Build an engine, and score until a signal to stop. Raises StartError."""
    if settings.upstream:
        raise StartError("--canary needs an engine of its own, and --upstream has none; leave one of them out")
    name = served_name(settings.model, settings.served_model_name)
    asyncio.run(check_redis(settings.redis_url, name))
    listener = bind(settings.internal_host, settings.internal_port)
    engine = build_engine(settings, name)
    model = engine.runner.model
    info = {"model": name, **arithmetic_labels(model, model.num_ranks), "weights": model.weights_digest}

    async def run() -> None:
        canary = Canary(
            engine, info, model_name=name, redis_url=settings.redis_url, share=settings.canary, listener=listener
        )
        await canary.run()

    settle()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    finally:
        model.close()
