"""A gateway's metrics, as Prometheus reads them. docs/operations.md explains each; a test keeps it complete.

What is in Redis is the same for all gateways of a lane: `quire_lane_...` and `quire_queue_...` are read when asked for,
at most once in LANE_S, and are missing while Redis does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from redis.exceptions import RedisError

from quire.gateway.admin.request_meter import RequestMeters
from quire.gateway.admission.canceller import Canceller
from quire.gateway.admission.worker_registry import WorkerRegistry
from quire.gateway.stream.router import FrameRouter
from quire.gateway.stream.subscription import Subscription
from quire.shared.broker import Broker
from quire.shared.broker.lane_state import LaneState, read_lane
from quire.shared.telemetry.loop_lag import LoopLag
from quire.shared.telemetry.prometheus import Exposition, counter, gauge, histogram

log = logging.getLogger("gateway")

LANE_S = 1.0
# How long Redis may keep a scrape waiting.
ANSWER_S = 2.0


class GatewayMetrics:
    """All that one gateway counts, and the state of its lane."""

    def __init__(
        self,
        broker: Broker,
        meters: RequestMeters,
        fleet: WorkerRegistry,
        fanout: FrameRouter,
        subscription: Subscription,
        canceller: Canceller,
        lag: LoopLag,
    ) -> None:
        self._broker = broker
        self._meters = meters
        self._fleet = fleet
        self._fanout = fanout
        self._subscription = subscription
        self._canceller = canceller
        self._lag = lag
        self._exposition = Exposition("gateway")
        self._lane: LaneState | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def render(self) -> bytes:
        """The exposition now."""
        lane = await self._read_lane()
        families = [*self._calls(), *self._latency(), *self._streams(), *self._redis(lane is not None)]
        if lane is not None:
            families += [self._retry_after(lane), *_lane(self._broker.keys.lane, lane)]
        return self._exposition.render(families)

    async def _read_lane(self) -> LaneState | None:
        async with self._reading:
            loop = asyncio.get_running_loop()
            if loop.time() - self._read_at < LANE_S:
                return self._lane
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._lane = await read_lane(self._broker)
            except (RedisError, OSError, ValueError) as error:  # TimeoutError is an OSError
                log.warning("the state of the queue cannot be read now: %s", error or type(error).__name__)
                self._lane = None
            self._read_at = loop.time()
            return self._lane

    def _calls(self) -> Iterator[Metric]:
        meters = self._meters
        yield counter("quire_http_requests", "HTTP requests that were answered", meters.http, ("route", "status"))
        yield counter("quire_calls", "Calls that ended", meters.calls, ("dialect", "kind", "outcome"))
        yield counter("quire_refusals", "HTTP requests that were refused, by reason", meters.refusals, ("reason",))
        yield gauge("quire_open_calls", "Calls that are being answered", meters.open_calls, ("dialect",))
        yield counter("quire_prompt_tokens", "Prompt tokens of accepted calls", meters.prompt_tokens, ("dialect",))
        yield counter(
            "quire_completion_tokens", "Tokens that were written to clients", meters.completion_tokens, ("dialect",)
        )

    def _latency(self) -> Iterator[Metric]:
        meters, labels = self._meters, ("dialect",)
        yield histogram(
            "quire_time_to_first_token_seconds",
            "From the receipt of a streamed call until its first token is written",
            meters.first_token_s,
            labels,
        )
        yield histogram(
            "quire_inter_token_latency_seconds",
            "Between two writes to a stream that bring tokens",
            meters.between_tokens_s,
            labels,
        )
        yield histogram(
            "quire_call_duration_seconds",
            "From the receipt of a call to the end of its answer, of those that ended well",
            meters.complete_s,
            labels,
        )
        yield histogram(
            "quire_gateway_overhead_seconds",
            "From receipt to acceptance, and from a worker's message to the client's socket",
            meters.overhead_s,
            ("part",),
        )
        yield histogram("quire_event_loop_lag_seconds", "How late the event loop wakes up", self._lag.seconds)

    def _streams(self) -> Iterator[Metric]:
        meters, fanout = self._meters, self._fanout
        yield gauge("quire_open_streams", "Streams of events that are open", meters.open_streams)
        yield counter("quire_slow_clients", "Connections that were cut because nobody read them", meters.slow_clients)
        yield counter("quire_gap_repairs", "Gaps in published output that the log filled", fanout.repairs)
        yield counter("quire_log_reads", "Reads of output logs", fanout.log_reads)
        yield counter("quire_cancellations", "Requests that this gateway cancelled", self._canceller.cancelled)

    def _redis(self, answers: bool) -> Iterator[Metric]:
        subscription, fanout = self._subscription, self._fanout
        yield gauge("quire_redis_up", "Whether Redis answered this scrape", float(answers))
        yield gauge("quire_subscribed", "Whether the workers' output is heard", float(subscription.ready.is_set()))
        yield counter("quire_frames", "Messages with output that workers published", subscription.frames)
        yield counter("quire_resubscriptions", "Subscriptions after the first", max(0, subscription.subscribes - 1))
        yield counter(
            "quire_corrupt_messages",
            "What could not be decoded, by where it was",
            {
                "frame": subscription.corrupt,
                "log": fanout.corrupt_logs,
                "about": self._meters.corrupt_abouts,
                "card": self._broker.corrupt["worker card"],
            },
            ("where",),
        )
        yield gauge("quire_live_workers", "Workers that make progress", len(self._fleet.workers))

    def _retry_after(self, lane: LaneState) -> Metric:
        wait_s = self._fleet.rate.retry_after_s(sum(lane.waiting.values()))
        return gauge(
            "quire_retry_after_seconds", "When a client that finds the queue full is told to come again", wait_s
        )


def _lane(name: str, lane: LaneState) -> Iterator[Metric]:
    model = ("model",)
    yield counter("quire_lane_accepted", "Requests that were accepted into the lane", {name: lane.accepted}, model)
    yield counter(
        "quire_lane_ended",
        "Requests of the lane that ended, by outcome",
        {(name, outcome): count for outcome, count in lane.ended.items()},
        (*model, "outcome"),
    )
    yield gauge("quire_lane_running", "Requests that workers have taken", {name: lane.running}, model)
    yield gauge("quire_lane_dead", "Requests that were quarantined and are kept", {name: lane.dead}, model)
    for metric, what, values in (
        ("quire_queue_requests", "Requests that wait, by priority class", lane.waiting),
        ("quire_queue_tokens", "Tokens that waiting requests may need, by priority class", lane.tokens),
        ("quire_queue_oldest_age_seconds", "How long the first request of a queue waits", lane.oldest_s),
    ):
        yield gauge(metric, what, {(name, class_): float(value) for class_, value in values.items()}, (*model, "class"))
