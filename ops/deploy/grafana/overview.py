"""The board to look at first: health and load of the whole system."""

from __future__ import annotations

from quire.ops.deploy.grafana.panels import (
    TOKENS_PER_SECOND,
    Board,
    Line,
    Panel,
    Thresholds,
    lane,
    lane_rate,
    of,
    quantile,
    quantiles,
    rate,
    series,
    share,
    stat,
)

FAILED = 'outcome=~"error|quarantined"'
FIRST_TOKEN = "quire_time_to_first_token_seconds"
BETWEEN_TOKENS = "quire_inter_token_latency_seconds"
# The numbers of now share one row of Grafana's 24 columns.
NOW_WIDTH = 3


def board() -> Board:
    return Board(
        uid="quire-overview",
        title="Quire: overview",
        about="Requests, latencies, queue and saturation of gateways and workers on one page.",
        rows={"Now": _now(), "Traffic": _traffic(), "Latency": _latency(), "Saturation": _saturation()},
        instances="label_values(quire_build_info, instance)",
        models=True,
    )


def _now() -> list[Panel]:
    return [
        stat(
            "Requests",
            "reqps",
            "Calls that ended per second, whatever their outcome. If it is 0 although clients send calls, look at "
            "the gateways' logs.",
            Line(rate("quire_calls_total"), "calls"),
            width=NOW_WIDTH,
        ),
        stat(
            "Failed",
            "percentunit",
            "Share of ended requests that failed for another reason than a client error; look for `error` and "
            "`quarantined` in the workers' logs, and at `quire dead`.",
            Line(share(lane_rate("quire_lane_ended_total", FAILED), lane_rate("quire_lane_ended_total")), "failed"),
            Thresholds(0.001, 0.01),
            width=NOW_WIDTH,
        ),
        stat(
            "Prompt tokens",
            TOKENS_PER_SECOND,
            "Prompt tokens of accepted calls per second; if they far exceed the tokens written, prefill takes most "
            "of the time: see the prefix cache hits on the workers' board.",
            Line(rate("quire_prompt_tokens_total"), "prompt"),
            width=NOW_WIDTH,
        ),
        stat(
            "Tokens written",
            TOKENS_PER_SECOND,
            "Tokens written to clients per second; if the rate falls while requests wait, look at preemptions and "
            "step times on the workers' board.",
            Line(rate("quire_completion_tokens_total"), "completion"),
            width=NOW_WIDTH,
        ),
        stat(
            "First token, p95",
            "s",
            "Time to the first token of streamed calls; if it grows, the latency board shows whether the queue or "
            "prefill causes it.",
            Line(quantile(0.95, FIRST_TOKEN), "p95"),
            Thresholds(1, 2),
            width=NOW_WIDTH,
        ),
        stat(
            "Waiting",
            "short",
            "Requests in the queue that no worker has claimed; if the number stays high, add workers.",
            Line(lane("quire_queue_requests"), "waiting"),
            Thresholds(100, 500),
            width=NOW_WIDTH,
        ),
        stat(
            "Live workers",
            "short",
            "Workers of the chosen models that make progress; at 0 requests are accepted but wait: start a worker.",
            Line(lane("quire_live_workers"), "workers"),
            Thresholds(2, 1, below=True),
            width=NOW_WIDTH,
        ),
        stat(
            "Open streams",
            "short",
            "Event streams that gateways have open; the number should fall while gateways are drained.",
            Line(f"sum({of('quire_open_streams')})", "streams"),
            width=NOW_WIDTH,
        ),
    ]


def _traffic() -> list[Panel]:
    return [
        series(
            "Calls by outcome",
            "reqps",
            "Calls that ended per second, by outcome: `gone` means that the client disconnected, `refused` that the "
            "call never reached the queue; if `error` or `quarantined` appear, read the workers' logs.",
            Line(rate("quire_calls_total", by="outcome"), "{{outcome}}"),
            stacked=True,
        ),
        series(
            "Failed requests",
            "percentunit",
            "Share of the lane's ended requests with outcome `error` or `quarantined`; above 0.1 % look at the SLO "
            "board.",
            Line(share(lane_rate("quire_lane_ended_total", FAILED), lane_rate("quire_lane_ended_total")), "failed"),
            limits=Thresholds(0.001, 0.01),
        ),
        series(
            "Refusals by reason",
            "reqps",
            "HTTP requests that were answered with an error, by reason: for `queue_full` add workers, for "
            "`broker_unavailable` check Redis, for `invalid_request` tell the client.",
            Line(rate("quire_refusals_total", by="reason") + " > 0", "{{reason}}"),
            stacked=True,
        ),
        series(
            "Tokens in and out",
            TOKENS_PER_SECOND,
            "Prompt tokens of accepted calls and tokens written to clients, per second; if the tokens written fall "
            "under load, look at preemptions and step times.",
            Line(rate("quire_prompt_tokens_total"), "prompt"),
            Line(rate("quire_completion_tokens_total"), "completion"),
        ),
        series(
            "Open calls and streams",
            "short",
            "Calls in progress per dialect, and open streams; if one gateway has all of them, the other gateways or "
            "the load balancer failed.",
            Line(f"sum by (dialect) ({of('quire_open_calls')})", "{{dialect}} calls"),
            Line(f"sum({of('quire_open_streams')})", "streams"),
        ),
        series(
            "HTTP by status",
            "reqps",
            "HTTP answers per second by status: 5xx points to Redis or a defect (see the gateways' logs), 429 to a "
            "full queue.",
            Line(rate("quire_http_requests_total", 'route=~"/v1/.*"', by="status"), "{{status}}"),
            stacked=True,
        ),
    ]


def _latency() -> list[Panel]:
    return [
        series(
            "Time to first token, p50 p95 p99",
            "s",
            "Time from the receipt of a streamed call to its first token; if it grows with the queue, add workers, "
            "otherwise limit the prefill per step.",
            *quantiles(FIRST_TOKEN),
            limits=Thresholds(1, 2),
        ),
        series(
            "Between tokens, p50 p95 p99",
            "s",
            "Time between two writes to a stream; if it grows, prompts take too much of the steps "
            "(`--itl-target-ms`) or batches are too large (`--max-num-seqs`).",
            *quantiles(BETWEEN_TOKENS),
        ),
        series(
            "Whole calls, p50 p95 p99",
            "s",
            "Time from receipt to end of successful calls; it depends on the lengths that clients request, so judge "
            "by the time to first token and between tokens.",
            *quantiles("quire_call_duration_seconds"),
        ),
    ]


def _saturation() -> list[Panel]:
    used = of("quire_kv_blocks", 'state="used"')
    idle = of("quire_engine_idle_seconds_total")
    return [
        series(
            "Queue",
            "short",
            "Requests that wait and requests that run, over all classes; if waiting grows while running stays "
            "constant, workers are full: add workers.",
            Line(lane("quire_queue_requests"), "waiting"),
            Line(lane("quire_lane_running"), "running"),
        ),
        series(
            "Workers' KV cache in use",
            "percentunit",
            "Used blocks as a share of all blocks, per worker; near 1 requests preempt each other: raise "
            "`--kv-cache-gb` or lower `--max-num-seqs`.",
            Line(f"sum by (instance) ({used}) / sum by (instance) ({of('quire_kv_capacity_blocks')})", "{{instance}}"),
            limits=Thresholds(0.85, 0.95),
        ),
        series(
            "Engines at work",
            "percentunit",
            "Share of time in which the engine has work, per worker; if all are near 1 while the queue grows, add "
            "workers. A worker at 0 while others are busy is stuck or disconnected.",
            Line(f"clamp_min(1 - rate({idle}[$__rate_interval]), 0)", "{{instance}}"),
        ),
    ]
