"""Where the time goes: the parts of a call in the order in which it goes through them."""

from __future__ import annotations

from quire.ops.deploy.grafana.panels import Board, Line, Panel, Thresholds, heat, mean, of, quantile, quantiles, series


def board() -> Board:
    return Board(
        uid="quire-latency",
        title="Quire: latency",
        about="Distributions of what clients wait for, and of what each part of the way adds.",
        rows={"What clients see": _clients(), "On the way": _way(), "In a step": _step(), "Processes": _processes()},
        instances="label_values(quire_build_info, instance)",
    )


def _clients() -> list[Panel]:
    return [
        heat(
            "Time to first token",
            "Streamed calls by the time to their first token; two bands are two kinds of prompts, a band that rises is "
            "the queue: compare with queue wait.",
            "quire_time_to_first_token_seconds",
        ),
        heat(
            "Between tokens",
            "Pauses between writes to a stream; a second band above the first are steps with prompts in them: lower "
            "`--max-prefill-tokens` or set `--itl-target-ms`.",
            "quire_inter_token_latency_seconds",
        ),
        heat(
            "Whole calls",
            "Calls that ended well, by their duration; it follows the lengths of answers, so look here for calls that "
            "time out rather than for slowness.",
            "quire_call_duration_seconds",
        ),
        series(
            "First token by dialect, p95",
            "s",
            "p95 for chats and completions; if only one is slow, its prompts are longer or miss the prefix cache.",
            Line(quantile(0.95, "quire_time_to_first_token_seconds", by="dialect"), "{{dialect}} p95"),
        ),
        series(
            "Between tokens by dialect, p99",
            "s",
            "p99 for chats and completions; both run in the same steps, so a difference points to the way from gateway "
            "to client.",
            Line(quantile(0.99, "quire_inter_token_latency_seconds", by="dialect"), "{{dialect}} p99"),
        ),
        series(
            "Means along the way",
            "s",
            "Mean times of the parts before the first token: what grows is where to look; the rest of the time to "
            "first token is prefill.",
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
            "From acceptance to the first claim by a worker; if it is more than moments, all workers are full: add "
            "some.",
            "quire_queue_wait_seconds",
        ),
        heat(
            "Gateway: until accepted",
            "From receipt until the call is in the queue, tokenizing included; if it grows, prompts are long or the "
            "gateway is short of CPU: add gateways.",
            "quire_gateway_overhead_seconds",
            'part="accept"',
        ),
        heat(
            "Gateway: to the client",
            "From a worker's message to the client's socket; above some milliseconds the gateway is short of CPU: see "
            "the lag of its event loop.",
            "quire_gateway_overhead_seconds",
            'part="deliver"',
        ),
        series(
            "Queue wait by class, p95",
            "s",
            "p95 by priority class; if interactive requests wait, too many are called interactive or workers are too "
            "few.",
            Line(quantile(0.95, "quire_queue_wait_seconds", by="class"), "{{class}} p95"),
            limits=Thresholds(1, 5),
        ),
        series(
            "Gateway overhead, p99",
            "s",
            "p99 of both parts; the rest of any latency is queue, model and network.",
            Line(quantile(0.99, "quire_gateway_overhead_seconds", by="part"), "{{part}} p99"),
            limits=Thresholds(0.025, 0.1),
        ),
        series(
            "Commits",
            "s",
            "Time of a worker's commit to Redis, which each token waits for; if it grows, Redis or its disk is slow: "
            "see the Redis board.",
            *quantiles("quire_commit_seconds"),
            limits=Thresholds(0.05, 0.25),
        ),
    ]


def _step() -> list[Panel]:
    return [
        heat(
            "Steps",
            "Steps by duration, of whatever kind; the upper band are prompts: `--max-prefill-tokens` bounds it.",
            "quire_step_seconds",
        ),
        series(
            "Mean time by phase",
            "s",
            "The parts of a step on top of each other: `execute` should be nearly all; if `schedule` or `commit` "
            "shows, batches are many and tiny.",
            Line(mean("quire_step_phase_seconds", by="phase"), "{{phase}}"),
            stacked=True,
        ),
        series(
            "Time by phase, p99",
            "s",
            "The slow end of each part; a phase that is slow only here is disturbed by its neighbours on the machine.",
            Line(quantile(0.99, "quire_step_phase_seconds", by="phase"), "{{phase}} p99"),
        ),
        heat(
            "Execute",
            "Times of the model itself; if it widens with the same batch size, the machine is shared or throttles.",
            "quire_step_phase_seconds",
            'phase="execute"',
        ),
        series(
            "Steps by kind, p95",
            "s",
            "p95 of steps that decode, prefill, or do both; mixed ones far above decodes are what makes tokens late.",
            Line(quantile(0.95, "quire_step_seconds", by="kind"), "{{kind}} p95"),
        ),
        series(
            "Between steps",
            "s",
            "From one step to the next while there is work: time in which the model does nothing; if it grows, the "
            "worker's process is short of CPU.",
            *quantiles("quire_engine_gap_seconds"),
        ),
    ]


def _processes() -> list[Panel]:
    return [
        heat(
            "Event-loop lag",
            "How late event loops wake up, over gateways and workers; all that a process does waits so long at least: "
            "give it CPU or add processes.",
            "quire_event_loop_lag_seconds",
        ),
        series(
            "Event-loop lag by process, p99",
            "s",
            "p99 per process; the one that stands out is short of CPU, or something blocks its loop.",
            Line(quantile(0.99, "quire_event_loop_lag_seconds", by="job, instance"), "{{job}} {{instance}}"),
            limits=Thresholds(0.025, 0.05),
        ),
        series(
            "CPU by process",
            "short",
            "Cores that each process uses; a gateway at 1 is at its end, so add one.",
            Line(
                f"rate({of('process_cpu_seconds_total')}[$__rate_interval]) * on (instance) group_left (process) "
                f"{of('quire_build_info')}",
                "{{process}} {{instance}}",
            ),
        ),
    ]
