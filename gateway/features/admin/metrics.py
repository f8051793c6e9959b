"""The metrics of a gateway, in Prometheus' format. docs/metrics.md describes each one, and a test compares the two.

`quire_lane_...` and `quire_queue_...` are read from Redis, and are the same at all gateways of a lane. A scrape reads
them from Redis unless the last read was less than LANE_S ago. A scrape leaves them out while Redis does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric
from redis.exceptions import RedisError

from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.shared.protocol.broker.lane_state import LaneState, read_lane
from quire.shared.telemetry.prometheus import Exposition, counter, gauge, histogram

log = logging.getLogger("gateway")

# Shortest time between two reads of the lane's state, in seconds.
LANE_S = 1.0
# Longest time that a scrape waits for Redis.
ANSWER_S = 2.0


class GatewayMetrics:
    """Renders what one gateway has counted, and the states of the lanes of its models."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._exposition = Exposition("gateway")
        self._lanes: dict[str, LaneState] = {}
        self._answers = False
        self._usage: Mapping[tuple[str, str], int] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def render(self) -> bytes:
        """Return the exposition of this moment."""
        await self._read_lanes()
        families = [*self._calls(), *self._latency(), *self._streams(), *self._redis(self._answers)]
        families += [family for families_of in self._directory.process.metrics for family in families_of()]
        if self._lanes:
            families += [self._retry_after(), *_lanes(self._lanes)]
            families.append(
                gauge("quire_usage_tokens", "Tokens of API keys today, by key", self._usage, ("key", "kind"))
            )
        return self._exposition.render(families)

    async def _read_lanes(self) -> None:
        async with self._reading:
            loop = asyncio.get_running_loop()
            if loop.time() - self._read_at < LANE_S:
                return
            models = self._directory.gateways
            figures = await asyncio.gather(*map(_read_lane, models))
            lanes = zip(models, figures, strict=True)
            self._lanes = {gateway.model.name: lane for gateway, lane in lanes if lane is not None}
            self._answers = bool(self._lanes) if models else self._directory.redis_answers
            if self._lanes:
                await self._read_usage()
            self._read_at = loop.time()

    async def _read_usage(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._usage = await self._directory.process.keys.tokens_today(self._directory.clients)
        except (RedisError, OSError, ValueError) as error:  # TimeoutError is an OSError
            log.warning("the usage of API keys cannot be read now: %s", error or type(error).__name__)

    def _calls(self) -> Iterator[Metric]:
        meters = self._directory.process.meters
        yield counter("quire_http_requests", "HTTP requests that have ended", meters.http, ("route", "status"))
        yield counter("quire_calls", "Calls that have ended", meters.calls, ("dialect", "kind", "outcome"))
        yield counter("quire_refusals", "HTTP requests answered with an error", meters.refusals, ("reason",))
        yield gauge("quire_open_calls", "Calls that have not ended", meters.open_calls, ("dialect",))
        yield counter("quire_prompt_tokens", "Prompt tokens of accepted calls", meters.prompt_tokens, ("dialect",))
        yield counter(
            "quire_completion_tokens", "Generated tokens written to clients", meters.completion_tokens, ("dialect",)
        )

    def _latency(self) -> Iterator[Metric]:
        meters, labels = self._directory.process.meters, ("dialect",)
        yield histogram(
            "quire_time_to_first_token_seconds",
            "Time from receiving a streamed call to writing its first token",
            meters.first_token_s,
            labels,
        )
        yield histogram(
            "quire_inter_token_latency_seconds",
            "Time between two writes of tokens to one stream",
            meters.between_tokens_s,
            labels,
        )
        yield histogram(
            "quire_call_duration_seconds",
            "Time from receiving a call to the end of its answer, for calls that ended with stop or length",
            meters.complete_s,
            labels,
        )
        yield histogram(
            "quire_gateway_overhead_seconds",
            "Time in the gateway: accept is from receiving a call to its acceptance, deliver is from receiving a frame "
            "of a worker to writing it",
            meters.overhead_s,
            ("part",),
        )
        yield histogram(
            "quire_event_loop_lag_seconds",
            "Delay of timers in the event loop",
            self._directory.process.loop_lag.seconds,
        )

    def _streams(self) -> Iterator[Metric]:
        meters, models = self._directory.process.meters, self._directory.gateways
        yield gauge("quire_open_streams", "Open event streams of calls", meters.open_streams)
        yield counter("quire_slow_clients", "Connections closed because their client did not read", meters.slow_clients)
        repairs = sum(gateway.router.stats.repairs for gateway in models)
        yield counter("quire_gap_repairs", "Gaps in published output that were filled from the log", repairs)
        log_reads = sum(gateway.router.stats.log_reads for gateway in models)
        yield counter("quire_log_reads", "Reads of output logs", log_reads)
        cancelled = sum(gateway.canceller.cancelled for gateway in models)
        yield counter("quire_cancellations", "Requests cancelled by this gateway", cancelled)

    def _redis(self, answers: bool) -> Iterator[Metric]:
        models = self._directory.gateways
        subscriptions = [gateway.subscription for gateway in models]
        yield gauge("quire_redis_up", "Constant 1 while Redis answers scrapes, else 0", float(answers))
        yield gauge(
            "quire_subscribed",
            "Subscriptions to the output of workers: 1 while those of all models stand, else 0",
            float(all(subscription.ready.is_set() for subscription in subscriptions)),
        )
        frames = sum(subscription.frames for subscription in subscriptions)
        yield counter("quire_frames", "Frames of output received from workers", frames)
        yield counter(
            "quire_resubscriptions",
            "Subscriptions made after the connection for workers' output was lost",
            sum(max(0, subscription.subscribes - 1) for subscription in subscriptions),
        )
        yield counter(
            "quire_corrupt_messages",
            "Messages that could not be decoded, by kind",
            {
                "frame": sum(subscription.corrupt for subscription in subscriptions),
                "log": sum(gateway.router.stats.corrupt_logs for gateway in models),
                "metadata": self._directory.process.meters.corrupt_metadata,
                "card": sum(gateway.broker.corrupt["worker card"] for gateway in models),
            },
            ("where",),
        )
        workers = {gateway.model.name: float(len(gateway.worker_registry.workers)) for gateway in models}
        yield gauge("quire_live_workers", "Workers that are registered, by model", workers, ("model",))
        hosted = {gateway.model.name: float(gateway.worker_registry.hosted is not None) for gateway in models}
        yield gauge("quire_hosted_models", "1 if a host loads the model on demand", hosted, ("model",))
        yield gauge("quire_models", "Models that this gateway serves", float(len(models)))
        faults = float(self._directory.num_refused)
        yield gauge("quire_refused_models", "Registered models that this gateway cannot serve", faults)

    def _retry_after(self) -> Metric:
        waits = {
            gateway.model.name: float(
                gateway.worker_registry.rate.retry_after_s(sum(self._lanes[gateway.model.name].waiting.values()))
            )
            for gateway in self._directory.gateways
            if gateway.model.name in self._lanes
        }
        what = "Retry-After of a call that finds the queue of its model full now"
        return gauge("quire_retry_after_seconds", what, waits, ("model",))


async def _read_lane(gateway: Gateway) -> LaneState | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await read_lane(gateway.broker)
    except (RedisError, OSError, ValueError) as error:  # TimeoutError is an OSError
        log.warning("the state of the queue cannot be read now: %s", error or type(error).__name__)
        return None


def _lanes(lanes: dict[str, LaneState]) -> Iterator[Metric]:
    model = ("model",)
    yield counter(
        "quire_lane_accepted", "Requests accepted into the lane", {n: lane.accepted for n, lane in lanes.items()}, model
    )
    yield counter(
        "quire_lane_ended",
        "Requests of the lane that have ended, by outcome",
        {(name, outcome): count for name, lane in lanes.items() for outcome, count in lane.ended.items()},
        (*model, "outcome"),
    )
    running = {name: lane.running for name, lane in lanes.items()}
    yield gauge("quire_lane_running", "Requests of the lane that workers are running", running, model)
    parked = {name: lane.parked for name, lane in lanes.items()}
    yield gauge("quire_lane_parked", "Parked requests of the lane", parked, model)
    dead = {name: lane.dead for name, lane in lanes.items()}
    yield gauge("quire_lane_dead", "Quarantined requests in the dead-letter stream", dead, model)
    for metric, what, part in (
        ("quire_queue_requests", "Requests waiting in the queue, by priority class", "waiting"),
        ("quire_queue_tokens", "Tokens that waiting requests may need, by priority class", "tokens"),
        ("quire_queue_tenants", "Tenants that wait for their share, by priority class", "tenants"),
        ("quire_queue_oldest_age_seconds", "Age of the oldest waiting request, by priority class", "oldest_s"),
    ):
        values: dict[tuple[str, ...], float] = {
            (name, class_): float(value)
            for name, lane in lanes.items()
            for class_, value in getattr(lane, part).items()
        }
        yield gauge(metric, what, values, (*model, "class"))
