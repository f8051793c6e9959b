"""Latencies: the parts of a call, in the order in which a call passes through them."""

from __future__ import annotations

from quire.ops.deploy.grafana.panels import Board, Line, Panel, Thresholds, heat, mean, of, quantile, quantiles, series


def board() -> Board:
    return Board(
        uid="quire-latency",
        title="Quire: latency",
        about="Distributions of the latencies that clients see, and of the parts that add up to them.",
        rows={"What clients see": _clients(), "On the way": _way(), "In a step": _step(), "Processes": _processes()},
        instances="label_values(quire_build_info, instance)",
    )


def _clients() -> list[Panel]:
    return [
        heat(
            "Time to first token",
            "Streamed calls by time to first token; two bands are two kinds of prompts. A band that rises is the "
            "queue: compare with queue wait.",
            "quire_time_to_first_token_seconds",
        ),
        heat(
            "Between tokens",
            "Pauses between writes to a stream; a second, higher band are steps that contain prompts: lower "
            "`--max-prefill-tokens` or set `--itl-target-ms`.",
            "quire_inter_token_latency_seconds",
        ),
        heat(
            "Whole calls",
            "Successful calls by duration, which depends on the lengths of answers; use this panel to find calls "
            "that time out rather than slowness.",
            "quire_call_duration_seconds",
        ),
        series(
            "First token by dialect, p95",
            "s",
            "p95 of the time to first token for chats and completions; if only one is slow, its prompts are longer "
            "or miss the prefix cache.",
            Line(quantile(0.95, "quire_time_to_first_token_seconds", by="dialect"), "{{dialect}} p95"),
        ),
        series(
            "Between tokens by dialect, p99",
            "s",
            "p99 of the time between tokens for chats and completions; both run in the same steps, so a difference "
            "is caused between gateway and client.",
            Line(quantile(0.99, "quire_inter_token_latency_seconds", by="dialect"), "{{dialect}} p99"),
        ),
        series(
            "Means along the way",
            "s",
            "Mean times of the parts before the first token; the part that grows is the cause. The rest of the time "
            "to first token is prefill.",
            Line(mean("quire_gateway_overhead_seconds", 'part="accept"'), "accept"),
            Line(mean("quire_queue_wait_seconds"), "queue wait"),
            Line(mean("quire_commit_seconds"), "commit"),
            Line(mean("quire_gateway_overhead_seconds", 'part="deliver"'), "deliver"),
            Line(mean("quire_time_to_first_token_seconds"), "time to first token"),
        ),
    ]


def _way() -> list[Panel]:
    return [
        heat(
            "Queue wait",
            "Time from acceptance to the first claim by a worker; if it is more than an instant, all workers are "
            "full: add workers.",
            "quire_queue_wait_seconds",
        ),
        heat(
            "Gateway: until accepted",
            "Time from receipt until the call is in the queue, including tokenizing; if it grows, prompts are long "
            "or the gateway lacks CPU: add gateways.",
            "quire_gateway_overhead_seconds",
            'part="accept"',
        ),
        heat(
            "Gateway: to the client",
            "Time from the receipt of a worker's message to the write to the client; if it exceeds some "
            "milliseconds, the gateway lacks CPU: see the lag of its event loop.",
            "quire_gateway_overhead_seconds",
            'part="deliver"',
        ),
        series(
            "Queue wait by class, p95",
            "s",
            "p95 of the queue wait by priority class; if interactive requests wait, too many requests are marked "
            "interactive or there are too few workers.",
            Line(quantile(0.95, "quire_queue_wait_seconds", by="class"), "{{class}} p95"),
            limits=Thresholds(1, 5),
        ),
        series(
            "Gateway overhead, p99",
            "s",
            "p99 of the time in the gateway, before acceptance and on the way to the client; the rest of any latency "
            "is queue, model and network.",
            Line(quantile(0.99, "quire_gateway_overhead_seconds", by="part"), "{{part}} p99"),
            limits=Thresholds(0.025, 0.1),
        ),
        series(
            "Commits, p50 p95 p99",
            "s",
            "Duration of a worker's commit to Redis, which delays every token; if it grows, Redis or its disk is "
            "slow: see the Redis board.",
            *quantiles("quire_commit_seconds"),
            limits=Thresholds(0.05, 0.25),
        ),
    ]


def _step() -> list[Panel]:
    return [
        heat(
            "Steps",
            "Steps of all kinds by duration; the upper band are steps with prompts: `--max-prefill-tokens` limits it.",
            "quire_step_seconds",
        ),
        series(
            "Mean time by phase",
            "s",
            "Mean times of the phases of a step, stacked; `execute` should be nearly all of it. If `schedule` or "
            "`commit` is visible, batches are tiny and frequent.",
            Line(mean("quire_step_phase_seconds", by="phase"), "{{phase}}"),
            stacked=True,
        ),
        series(
            "Time by phase, p99",
            "s",
            "p99 of each phase of a step; a phase that is slow only here is disturbed by other processes on the "
            "machine.",
            Line(quantile(0.99, "quire_step_phase_seconds", by="phase"), "{{phase}} p99"),
        ),
        heat(
            "Execute",
            "Duration of the forward pass; if it spreads while the batch size is constant, the machine is shared or "
            "throttled.",
            "quire_step_phase_seconds",
            'phase="execute"',
        ),
        series(
            "Steps by kind, p95",
            "s",
            "p95 of steps that decode, prefill, or do both; mixed steps far above decode steps delay tokens: lower "
            "`--max-prefill-tokens`.",
            Line(quantile(0.95, "quire_step_seconds", by="kind"), "{{kind}} p95"),
        ),
        series(
            "Between steps, p50 p95 p99",
            "s",
            "Time from one step to the next while there is work, in which the model computes nothing; if it grows, "
            "the worker's process lacks CPU.",
            *quantiles("quire_engine_gap_seconds"),
        ),
    ]


def _processes() -> list[Panel]:
    return [
        heat(
            "Event-loop lag",
            "Delay with which event loops wake up, over gateways and workers; it delays everything that a process "
            "does: give it CPU or add processes.",
            "quire_event_loop_lag_seconds",
        ),
        series(
            "Event-loop lag by process, p99",
            "s",
            "p99 of the event-loop lag per process; if one stands out, it lacks CPU or something blocks its loop.",
            Line(quantile(0.99, "quire_event_loop_lag_seconds", by="job, instance"), "{{job}} {{instance}}"),
            limits=Thresholds(0.025, 0.05),
        ),
        series(
            "CPU by process",
            "short",
            "Cores that each process uses; a gateway at 1 has reached its limit, so add one.",
            Line(
                f"rate({of('process_cpu_seconds_total')}[$__rate_interval]) * on (instance) group_left (process) "
                f"{of('quire_build_info')}",
                "{{process}} {{instance}}",
            ),
        ),
    ]
