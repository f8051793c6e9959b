"""The metrics of a gateway, in Prometheus' format. docs/metrics.md describes each one, and a test compares the two.

`quire_lane_...` and `quire_queue_...` are read from Redis, and are the same at all gateways of a lane. A scrape reads
them from Redis unless the last read was less than LANE_S ago. A scrape leaves them out while Redis does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from redis.exceptions import RedisError

from quire.gateway.service import Gateway
from quire.shared.broker.lane_state import LaneState, read_lane
from quire.shared.telemetry.prometheus import Exposition, counter, gauge, histogram

log = logging.getLogger("gateway")

# Shortest time between two reads of the lane's state, in seconds.
LANE_S = 1.0
# Longest time that a scrape waits for Redis.
ANSWER_S = 2.0


class GatewayMetrics:
    """Renders what one gateway has counted, and the state of its lane."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._exposition = Exposition("gateway")
        self._lane: LaneState | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def render(self) -> bytes:
        """Returns the exposition of this moment."""
        lane = await self._read_lane()
        families = [*self._calls(), *self._latency(), *self._streams(), *self._redis(lane is not None)]
        if lane is not None:
            families += [self._retry_after(lane), *_lane(self._gateway.broker.keys.lane, lane)]
        return self._exposition.render(families)

    async def _read_lane(self) -> LaneState | None:
        async with self._reading:
            loop = asyncio.get_running_loop()
            if loop.time() - self._read_at < LANE_S:
                return self._lane
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._lane = await read_lane(self._gateway.broker)
            except (RedisError, OSError, ValueError) as error:  # TimeoutError is an OSError
                log.warning("the state of the queue cannot be read now: %s", error or type(error).__name__)
                self._lane = None
            self._read_at = loop.time()
            return self._lane

    def _calls(self) -> Iterator[Metric]:
        meters = self._gateway.meters
        yield counter("quire_http_requests", "HTTP requests that have ended", meters.http, ("route", "status"))
        yield counter("quire_calls", "Calls that have ended", meters.calls, ("dialect", "kind", "outcome"))
        yield counter("quire_refusals", "HTTP requests answered with an error", meters.refusals, ("reason",))
        yield gauge("quire_open_calls", "Calls that have not ended", meters.open_calls, ("dialect",))
        yield counter("quire_prompt_tokens", "Prompt tokens of accepted calls", meters.prompt_tokens, ("dialect",))
        yield counter(
            "quire_completion_tokens", "Generated tokens written to clients", meters.completion_tokens, ("dialect",)
        )

    def _latency(self) -> Iterator[Metric]:
        meters, labels = self._gateway.meters, ("dialect",)
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
            "quire_event_loop_lag_seconds", "Delay of timers in the event loop", self._gateway.loop_lag.seconds
        )

    def _streams(self) -> Iterator[Metric]:
        meters, stats = self._gateway.meters, self._gateway.router.stats
        yield gauge("quire_open_streams", "Open event streams of calls", meters.open_streams)
        yield counter("quire_slow_clients", "Connections closed because their client did not read", meters.slow_clients)
        yield counter("quire_gap_repairs", "Gaps in published output that were filled from the log", stats.repairs)
        yield counter("quire_log_reads", "Reads of output logs", stats.log_reads)
        yield counter("quire_cancellations", "Requests cancelled by this gateway", self._gateway.canceller.cancelled)

    def _redis(self, answers: bool) -> Iterator[Metric]:
        gateway = self._gateway
        subscription = gateway.subscription
        yield gauge("quire_redis_up", "Constant 1 while Redis answers scrapes, else 0", float(answers))
        yield gauge(
            "quire_subscribed",
            "Subscription to the output of workers: 1 while it stands, else 0",
            float(subscription.ready.is_set()),
        )
        yield counter("quire_frames", "Frames of output received from workers", subscription.frames)
        yield counter(
            "quire_resubscriptions",
            "Subscriptions made after the connection for workers' output was lost",
            max(0, subscription.subscribes - 1),
        )
        yield counter(
            "quire_corrupt_messages",
            "Messages that could not be decoded, by kind",
            {
                "frame": subscription.corrupt,
                "log": gateway.router.stats.corrupt_logs,
                "about": gateway.meters.corrupt_abouts,
                "card": gateway.broker.corrupt["worker card"],
            },
            ("where",),
        )
        yield gauge("quire_live_workers", "Workers that are registered", len(gateway.worker_registry.workers))

    def _retry_after(self, lane: LaneState) -> Metric:
        wait_s = self._gateway.worker_registry.rate.retry_after_s(sum(lane.waiting.values()))
        return gauge("quire_retry_after_seconds", "Retry-After of a call that finds the queue full now", wait_s)


def _lane(name: str, lane: LaneState) -> Iterator[Metric]:
    model = ("model",)
    yield counter("quire_lane_accepted", "Requests accepted into the lane", {name: lane.accepted}, model)
    yield counter(
        "quire_lane_ended",
        "Requests of the lane that have ended, by outcome",
        {(name, outcome): count for outcome, count in lane.ended.items()},
        (*model, "outcome"),
    )
    yield gauge("quire_lane_running", "Requests of the lane that workers are running", {name: lane.running}, model)
    yield gauge("quire_lane_dead", "Quarantined requests in the dead-letter stream", {name: lane.dead}, model)
    for metric, what, values in (
        ("quire_queue_requests", "Requests waiting in the queue, by priority class", lane.waiting),
        ("quire_queue_tokens", "Tokens that waiting requests may need, by priority class", lane.tokens),
        ("quire_queue_oldest_age_seconds", "Age of the oldest waiting request, by priority class", lane.oldest_s),
    ):
        yield gauge(metric, what, {(name, class_): float(value) for class_, value in values.items()}, (*model, "class"))
