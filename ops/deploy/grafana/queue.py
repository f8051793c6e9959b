"""The queue of each model: depth, accepted and ended requests, refusals, and resumed streams."""

from __future__ import annotations

from quire.ops.deploy.grafana.panels import (
    Board,
    Line,
    Panel,
    Thresholds,
    lane,
    lane_rate,
    of,
    quantile,
    rate,
    series,
    share,
)


def board() -> Board:
    return Board(
        uid="quire-queue",
        title="Quire: queue",
        about="The lane of each model: depth, tokens and age by class, outcomes, refusals, clients that return.",
        rows={"Depth": _depth(), "In and out": _flow(), "Clients": _clients()},
        instances='label_values(quire_build_info{process="gateway"}, instance)',
        models=True,
    )


def _depth() -> list[Panel]:
    return [
        series(
            "Waiting requests",
            "short",
            "Requests that no worker has claimed, by priority class; if interactive ones stay, add workers.",
            Line(lane("quire_queue_requests", by="class"), "{{class}}"),
            stacked=True,
        ),
        series(
            "Waiting tokens",
            "short",
            "Prompt tokens plus requested tokens of waiting requests, a measure of the work ahead; near "
            "`--max-queued-tokens` new requests get 429.",
            Line(lane("quire_queue_tokens", by="class"), "{{class}}"),
            stacked=True,
        ),
        series(
            "Age of the oldest",
            "s",
            "Wait of the oldest request in each queue (`handed`: returned by a worker); if one grows steadily, no "
            "worker claims from it: look at the workers.",
            Line(lane("quire_queue_oldest_age_seconds", by="class"), "{{class}}"),
            limits=Thresholds(10, 30),
        ),
        series(
            "Tenants that wait",
            "short",
            "Projects and users with waiting requests, by priority class; with more than one they compete, and are "
            "served by their weights.",
            Line(lane("quire_queue_tenants", by="class"), "{{class}}"),
        ),
    ]


def _flow() -> list[Panel]:
    ended = lane_rate("quire_lane_ended_total")
    return [
        series(
            "Accepted and ended",
            "reqps",
            "Requests that enter and leave the lane; while more enter than leave, the queue grows: add workers "
            "before it is full.",
            Line(lane_rate("quire_lane_accepted_total"), "accepted"),
            Line(ended, "ended"),
        ),
        series(
            "Ended by outcome",
            "reqps",
            "Requests that ended, by outcome; `deadline` means that deadlines are shorter than the wait, for `error` "
            "and `quarantined` read the workers' logs.",
            Line(lane_rate("quire_lane_ended_total", by="outcome"), "{{outcome}}"),
            stacked=True,
        ),
        series(
            "Running",
            "short",
            "Requests that workers have claimed; if the number falls while others wait, workers have died or are "
            "full of long requests.",
            Line(lane("quire_lane_running", by="model"), "{{model}}"),
        ),
        series(
            "Share by class that starts at once",
            "percentunit",
            "Share of requests claimed within 0.1 s of acceptance, by priority class; if one class falls, priority "
            "works as intended. If all fall together, there are too few workers.",
            Line(
                share(
                    'sum by (class) (rate(quire_queue_wait_seconds_bucket{le="0.1"}[$__rate_interval]))',
                    "sum by (class) (rate(quire_queue_wait_seconds_count[$__rate_interval]))",
                ),
                "{{class}}",
            ),
        ),
        series(
            "Quarantined",
            "short",
            "Requests that killed workers and are kept; read them with `quire dead` and report the defect that they "
            "show.",
            Line(lane("quire_lane_dead", by="model"), "{{model}}"),
            limits=Thresholds(1, 10),
        ),
        series(
            "Entries of the queues in Redis",
            "short",
            "Length of the lane's streams, with an entry per waiting or running request; if it grows steadily, "
            "clients send more than the workers can serve.",
            Line(
                f"{lane('quire_queue_requests', by='model')} + {lane('quire_lane_running', by='model')}",
                "{{model}}",
            ),
        ),
    ]


def _clients() -> list[Panel]:
    return [
        series(
            "Refusals by reason",
            "reqps",
            "HTTP requests that were answered with an error, by reason; a long period of `queue_full` means too few "
            "workers, `broker_unavailable` that Redis does not answer.",
            Line(rate("quire_refusals_total", by="reason") + " > 0", "{{reason}}"),
            stacked=True,
        ),
        series(
            "Retry-After",
            "s",
            "Seconds after which clients are told to retry when the queue is full: the expected time until a tenth "
            "of the queue is served. At the maximum of 60 almost no request ends.",
            Line(lane("quire_retry_after_seconds", by="model"), "{{model}}"),
            limits=Thresholds(20, 60),
        ),
        series(
            "Clients that came back",
            "reqps",
            "Streams that were resumed, and idempotency keys that were reused; a burst of both follows the death of "
            "a gateway or a network problem.",
            Line(rate("quire_calls_total", 'kind="resumed"'), "resumed"),
            Line(rate("quire_calls_total", 'kind="joined"'), "joined"),
        ),
        series(
            "Clients that went away",
            "reqps",
            "Calls whose client disconnected, requests that were cancelled because of that, and streams without a "
            "reader; many `gone` calls with a long time to first token mean that clients gave up waiting.",
            Line(rate("quire_calls_total", 'outcome="gone"'), "gone"),
            Line(rate("quire_cancellations_total"), "cancelled"),
            Line(rate("quire_slow_clients_total"), "cut for not reading"),
        ),
        series(
            "Repairs of streams",
            "ops",
            "Gaps in published output that were filled from the log, reads of logs, and new subscriptions; steady "
            "repairs mean that Redis drops the gateway's subscription: see its client output buffer limits.",
            Line(rate("quire_gap_repairs_total"), "gap repairs"),
            Line(rate("quire_log_reads_total"), "log reads"),
            Line(rate("quire_resubscriptions_total"), "resubscriptions"),
            Line(rate("quire_corrupt_messages_total"), "corrupt messages"),
        ),
        series(
            "Gateways and Redis",
            "short",
            "1 if Redis answers, and 1 if the gateway is subscribed to the output of workers; at 0 the gateway "
            "cannot accept calls or has to read logs: look at its network.",
            Line(f"min by (instance) ({of('quire_redis_up')})", "Redis answers {{instance}}"),
            Line(f"min by (instance) ({of('quire_subscribed')})", "subscribed {{instance}}"),
            limits=Thresholds(1, 0.5, below=True),
        ),
        series(
            "Messages from workers",
            "ops",
            "Messages with output per second and gateway; a gateway at 0 while others are busy has no clients or no "
            "subscription.",
            Line(rate("quire_frames_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Time until accepted, p99",
            "s",
            "p99 of the time until a call is in the queue, per gateway; if one stands out, it lacks CPU or is far "
            "from Redis.",
            Line(quantile(0.99, "quire_gateway_overhead_seconds", 'part="accept"', by="instance"), "{{instance}} p99"),
        ),
    ]
