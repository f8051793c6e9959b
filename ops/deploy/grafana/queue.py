"""What waits, how long, in which class; what was accepted and how it ended; who is refused, and comes again."""

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
            "Requests that no worker has taken, by priority class; if interactive ones stay, add workers.",
            Line(lane("quire_queue_requests", by="class"), "{{class}}"),
            stacked=True,
        ),
        series(
            "Waiting tokens",
            "short",
            "Prompt tokens and tokens asked for of waiting requests, which is the work ahead; near "
            "`--max-queued-tokens` new requests get 429.",
            Line(lane("quire_queue_tokens", by="class"), "{{class}}"),
            stacked=True,
        ),
        series(
            "Age of the oldest",
            "s",
            "How long the first request of each queue waits (`handed`: handed back by a worker); if one grows with "
            "time, nobody takes from it: look at the workers.",
            Line(lane("quire_queue_oldest_age_seconds", by="class"), "{{class}}"),
            limits=Thresholds(10, 30),
        ),
    ]


def _flow() -> list[Panel]:
    ended = lane_rate("quire_lane_ended_total")
    return [
        series(
            "Accepted and ended",
            "reqps",
            "Requests into and out of the lane; while more come than end the queue grows, so add workers before it is "
            "full.",
            Line(lane_rate("quire_lane_accepted_total"), "accepted"),
            Line(ended, "ended"),
        ),
        series(
            "Ended by outcome",
            "reqps",
            "How requests ended; `deadline` means clients that give up sooner than the queue moves, `error` and "
            "`quarantined` ask for the workers' logs.",
            Line(lane_rate("quire_lane_ended_total", by="outcome"), "{{outcome}}"),
            stacked=True,
        ),
        series(
            "Running",
            "short",
            "Requests that workers have taken; if it falls while some wait, workers have died or are full of long "
            "ones.",
            Line(lane("quire_lane_running", by="model"), "{{model}}"),
        ),
        series(
            "Share by class that starts at once",
            "percentunit",
            "Claims within 0.1 s of acceptance, by priority class; a class that falls behind the others shows that "
            "priority works, all falling together that workers are too few.",
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
            "Length of the lane's streams: what waits and what runs has an entry each; if it grows without end, "
            "clients outpace workers.",
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
            "HTTP requests that were answered with an error; `queue_full` for long means too few workers, "
            "`broker_unavailable` a Redis that does not answer.",
            Line(rate("quire_refusals_total", by="reason"), "{{reason}}"),
            stacked=True,
        ),
        series(
            "Retry-After",
            "s",
            "When clients that find the queue full are told to come again: the time until a tenth of it is gone; at "
            "60, its ceiling, hardly anything ends.",
            Line(f"max by (instance) ({of('quire_retry_after_seconds')})", "{{instance}}"),
            limits=Thresholds(20, 60),
        ),
        series(
            "Clients that came back",
            "reqps",
            "Streams that were taken up again, and idempotency keys that were used before; a rush of both follows the "
            "death of a gateway or a bad network.",
            Line(rate("quire_calls_total", 'kind="resumed"'), "resumed"),
            Line(rate("quire_calls_total", 'kind="joined"'), "joined"),
        ),
        series(
            "Clients that went away",
            "reqps",
            "Calls that clients left, requests that were cancelled for it, and streams that nobody read; many `gone` "
            "with long first-token times are people who lost patience.",
            Line(rate("quire_calls_total", 'outcome="gone"'), "gone"),
            Line(rate("quire_cancellations_total"), "cancelled"),
            Line(rate("quire_slow_clients_total"), "cut for not reading"),
        ),
        series(
            "Repairs of streams",
            "ops",
            "Gaps in published output that the log filled, reads of logs, and new subscriptions; steady repairs mean "
            "that Redis drops the gateway's subscription: see its client output buffer limits.",
            Line(rate("quire_gap_repairs_total"), "gap repairs"),
            Line(rate("quire_log_reads_total"), "log reads"),
            Line(rate("quire_resubscriptions_total"), "resubscriptions"),
            Line(rate("quire_corrupt_messages_total"), "corrupt messages"),
        ),
        series(
            "Gateways and Redis",
            "short",
            "1 where Redis answers and where workers' output is heard; at 0 that gateway cannot accept or must read "
            "logs: look at its network.",
            Line(f"min by (instance) ({of('quire_redis_up')})", "Redis answers {{instance}}"),
            Line(f"min by (instance) ({of('quire_subscribed')})", "subscribed {{instance}}"),
            limits=Thresholds(1, 0.5, below=True),
        ),
        series(
            "Messages from workers",
            "ops",
            "Messages with output per second and gateway; a gateway at 0 beside busy ones has no clients or no "
            "subscription.",
            Line(rate("quire_frames_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Time until accepted, p99",
            "s",
            "p99 per gateway until a call is in the queue; the one that stands out is short of CPU or far from Redis.",
            Line(quantile(0.99, "quire_gateway_overhead_seconds", 'part="accept"', by="instance"), "{{instance}} p99"),
        ),
    ]
