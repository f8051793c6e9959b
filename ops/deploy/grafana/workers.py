"""Workers: batches, KV cache blocks, preemptions, and recovery of requests from other workers."""

from __future__ import annotations

from quire.ops.deploy.grafana.panels import (
    TOKENS_PER_SECOND,
    Board,
    Line,
    Panel,
    Thresholds,
    mean,
    of,
    quantile,
    quantiles,
    rate,
    series,
    share,
)


def board() -> Board:
    return Board(
        uid="quire-workers",
        title="Quire: workers and KV cache",
        about="Batches, blocks, sharing and preemptions of each worker; migrations, leases and commits of all.",
        rows={
            "Batches": _batches(),
            "KV cache": _blocks(),
            "Preemption": _pressure(),
            "Recovery": _recovery(),
            "Canaries": _canaries(),
        },
        instances='label_values(quire_build_info{process=~"worker|canary"}, instance)',
    )


def _batches() -> list[Panel]:
    return [
        series(
            "Batch size",
            "short",
            "Mean sequences per step, per worker; small batches under load mean that blocks or rows "
            "(`--max-num-seqs`) run out first.",
            Line(mean("quire_step_sequences", by="instance"), "{{instance}}"),
        ),
        series(
            "Tokens per step",
            "short",
            "Mean tokens per step, over steps with that phase; decode tokens are the batch. Prefill tokens at the "
            "budget of a step (`--max-num-batched-tokens`) mean that prompts queue up.",
            Line(mean("quire_step_tokens", by="phase"), "{{phase}}"),
        ),
        series(
            "Tokens computed",
            TOKENS_PER_SECOND,
            "Tokens computed per second by phase, including recomputed ones; if prefill far exceeds the incoming "
            "prompt tokens, preemptions are the cause.",
            Line(rate("quire_engine_tokens_total", by="phase"), "{{phase}}"),
            stacked=True,
        ),
        series(
            "Sequences",
            "short",
            "Sequences in the engines by state; if `waiting` or `swapped` stay high, requests do not fit: see the "
            "blocks.",
            Line(f"sum by (state) ({of('quire_sequences')})", "{{state}}"),
            stacked=True,
        ),
        series(
            "Steps",
            "ops",
            "Steps per second and worker; if a worker makes none while it holds leases, its engine hangs: its "
            "`/health` tells why.",
            Line(rate("quire_engine_steps_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Drafted tokens",
            TOKENS_PER_SECOND,
            "Drafted tokens per second, and those that were accepted, each of which saved its sequence a step, by "
            "source; if few are accepted and steps are slow, see `--speculation`.",
            Line(rate("quire_drafted_tokens_total", by="source"), "drafted, {{source}}"),
            Line(rate("quire_accepted_tokens_total", by="source"), "accepted, {{source}}"),
        ),
        series(
            "Prompt tokens that a step may take",
            "short",
            "Limit of prompt tokens per step that also decodes, learned from `--itl-target-ms` or set; at its "
            "minimum, prompts wait to keep streams fast.",
            Line(f"max by (instance) ({of('quire_prefill_limit_tokens')})", "{{instance}}"),
        ),
    ]


def _blocks() -> list[Panel]:
    used = f"sum by (instance) ({_blocks_of('used')})"
    waste = f"sum by (instance) ({of('quire_kv_waste_slots')})"
    return [
        series(
            "Blocks by state",
            "short",
            "All blocks: used, cached for prefixes, free; if all are used, raise `--kv-cache-gb` or lower "
            "`--max-num-seqs`.",
            Line(f"sum by (state) ({_blocks_of('used|cached|free')})", "{{state}}"),
            stacked=True,
        ),
        series(
            "In use",
            "percentunit",
            "Used blocks as a share of all blocks, per worker; near 1 requests preempt each other.",
            Line(f"{used} / sum by (instance) ({of('quire_kv_capacity_blocks')})", "{{instance}}"),
            limits=Thresholds(0.85, 0.95),
        ),
        series(
            "Shared and pinned blocks",
            "short",
            "Used blocks that are in two or more block tables, pinned blocks, and blocks saved by sharing; if none "
            "is shared although prompts have a common beginning, look for an early difference in them.",
            Line(f"sum({_blocks_of('shared')})", "shared"),
            Line(f"sum({_blocks_of('pinned')})", "pinned"),
            Line(f"sum({of('quire_kv_sharing_saved_blocks')})", "saved by sharing"),
        ),
        series(
            "Slots of used blocks",
            "short",
            "Slots of used blocks that are filled, reserved for known tokens, or wasted; less than a block per "
            "sequence is wasted. If the waste is visible, requests are much shorter than `--block-size`.",
            Line(f"sum by (state) ({of('quire_kv_slots')})", "{{state}}"),
            stacked=True,
        ),
        series(
            "Waste",
            "percentunit",
            "Slots that hold no token as a share of the slots of used blocks, per worker; above a tenth choose a "
            "smaller `--block-size`.",
            Line(
                f"{waste} / ({used} * sum by (instance) ({of('quire_kv_block_size_slots')}) > 0)",
                "{{instance}}",
            ),
            limits=Thresholds(0.1, 0.3),
        ),
        series(
            "Prefix cache hits",
            "percentunit",
            "Share of prompt tokens that were found in the prefix cache; if it falls, the beginnings of prompts have "
            "changed or cached blocks are evicted: pin prefixes or enlarge the cache.",
            Line(
                share(
                    rate("quire_prefix_cache_hit_tokens_total", by="instance"),
                    rate("quire_prefix_cache_query_tokens_total", by="instance"),
                ),
                "{{instance}}",
            ),
        ),
        series(
            "Evictions from the prefix cache",
            "ops",
            "Cached blocks that were evicted per second; many evictions with few hits mean that the cache is too "
            "small for the recurring prefixes.",
            Line(rate("quire_prefix_cache_evictions_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Copies and forks",
            "ops",
            "Blocks copied on write, and sequences forked from another; both come from `n`, `best_of` and beam "
            "search. If they cost too much, find the clients that use these.",
            Line(rate("quire_block_copies_total"), "copies"),
            Line(rate("quire_forks_total"), "forks"),
        ),
        series(
            "Host memory for swapping",
            "short",
            "Blocks of host memory by state; if none is free, preempted requests are recomputed instead: raise "
            "`--swap-gb`.",
            Line(f"sum by (state) ({of('quire_host_blocks')})", "{{state}}"),
            stacked=True,
        ),
        series(
            "Evicted blocks that are kept",
            "ops",
            "Blocks that fell out of the prefix cache and were kept, read back or dropped, per second, by tier and "
            "reason; if many are dropped because the queue is full, raise `--kv-host-gb`; of corrupt ones, look at the "
            "disk.",
            Line(rate("quire_spilled_blocks_total", by="tier"), "kept, {{tier}}"),
            Line(rate("quire_spill_read_blocks_total", by="tier"), "read back, {{tier}}"),
            Line(rate("quire_spill_dropped_blocks_total", by="reason"), "dropped, {{reason}}"),
        ),
    ]


def _blocks_of(states: str) -> str:
    return of("quire_kv_blocks", f'state=~"{states}"')


def _pressure() -> list[Panel]:
    return [
        series(
            "Preemptions by kind",
            "ops",
            "Requests preempted per second; if it persists, the cache is too small for `--max-num-seqs`: raise "
            "`--kv-cache-gb` or lower `--max-num-seqs`.",
            Line(rate("quire_preemptions_total", by="kind"), "{{kind}}"),
            stacked=True,
        ),
        series(
            "Displacements",
            "ops",
            "Preemptions in favour of a request of a higher class; a steady rate means that the higher class alone "
            "fills the workers.",
            Line(rate("quire_displacements_total"), "displaced"),
        ),
        series(
            "Swapped blocks",
            "ops",
            "Blocks copied to host memory and back, per second; both directions should balance. If they do not, "
            "requests are stuck: see swapped sequences.",
            Line(rate("quire_swapped_blocks_total", by="direction"), "{{direction}}"),
        ),
    ]


def _recovery() -> list[Panel]:
    workers = of("quire_build_info", 'process="worker"')
    return [
        series(
            "Attempts and migrations",
            "ops",
            "Requests that workers claimed, and those that another worker had begun; migrations without a rollout "
            "mean that workers die: read their logs.",
            Line(rate("quire_attempts_total"), "attempts"),
            Line(rate("quire_migrations_total"), "migrations"),
        ),
        series(
            "Overtaken attempts",
            "ops",
            "Commits that were fenced off, and leases lost to another worker; a worker was silent for longer than "
            "`--lease-s`: look for pauses, swapping hosts, or a slow Redis.",
            Line(rate("quire_fenced_commits_total"), "fenced"),
            Line(rate("quire_leases_lost_total"), "leases lost"),
        ),
        series(
            "Resends and failed commits",
            "ops",
            "Commits that Redis did not answer, and logs whose lost end was written again; resends mean that Redis "
            "restarted with older data: check its persistence.",
            Line(rate("quire_commit_failures_total"), "failed commits"),
            Line(rate("quire_log_resends_total"), "resends"),
        ),
        series(
            "Leases",
            "short",
            "Requests that each worker holds; a worker at 0 while others are full claims none: see its `/health`.",
            Line(f"sum by (instance) ({of('quire_leases')})", "{{instance}}"),
        ),
        series(
            "Commit latency, p50 p95 p99",
            "s",
            "Duration of a commit to Redis, which delays every token; if it grows, look at Redis and its disk.",
            *quantiles("quire_commit_seconds"),
            limits=Thresholds(0.05, 0.25),
        ),
        series(
            "Requests per commit, and behind",
            "short",
            "Requests per commit, and requests whose tokens wait for the next commit; waiting ones grow while Redis "
            "is slow.",
            Line(share(rate("quire_commit_requests_total"), rate("quire_commit_seconds_count")), "per commit"),
            Line(f"sum({of('quire_uncommitted_requests')})", "uncommitted"),
        ),
        series(
            "Ended by worker",
            "reqps",
            "Requests that each worker ended per second; a worker far below the rest has a slower machine or fewer "
            "blocks.",
            Line(rate("quire_worker_requests_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Memory of processes",
            "bytes",
            "Resident memory per worker; if it grows steadily, report it with the metrics of this board.",
            Line(
                f"{of('process_resident_memory_bytes')} * on (instance) group_left (process) {workers}",
                "{{instance}}",
            ),
        ),
        series(
            "Engine loop lag, p99",
            "s",
            "p99 of the delay with which the workers' event loops wake up; it delays commits and leases: give the "
            "worker CPU.",
            Line(
                f"{quantile(0.99, 'quire_event_loop_lag_seconds', by='instance')} and on (instance) {workers}",
                "{{instance}}",
            ),
            limits=Thresholds(0.025, 0.05),
        ),
    ]


def _canaries() -> list[Panel]:
    tokens, requests = "quire_canary_tokens_total", "quire_canary_requests_total"
    return [
        series(
            "Agreement of canaries",
            "percentunit",
            "Share of tokens that a canary chooses again, and of requests in which it chooses every token again; a "
            "canary that computes as the workers do is at 1, and what a quantisation may cost is for you to say.",
            Line(
                share(rate(tokens, 'result="equal"', by="instance"), rate(tokens, by="instance")),
                "tokens, {{instance}}",
            ),
            Line(
                share(rate(requests, 'result="exact"', by="instance"), rate(requests, by="instance")),
                "requests, {{instance}}",
            ),
        ),
        series(
            "How far canaries are off",
            "short",
            "Mean difference of log-probabilities where a canary chooses another token, and mean lower bound of the "
            "divergence per token of calls with `logprobs`, in nats; small margins are near-ties, large ones another "
            "model.",
            Line(mean("quire_canary_margin_nats", by="instance"), "margin, {{instance}}"),
            Line(mean("quire_canary_divergence_nats", by="instance"), "divergence, {{instance}}"),
        ),
        series(
            "Requests of canaries",
            "reqps",
            "Requests that canaries scored or skipped per second, by result and reason; if many are `behind`, lower "
            "`--canary` or give the canary more.",
            Line(rate(requests, by="result"), "{{result}}"),
            Line(rate("quire_canary_skipped_total", by="reason"), "{{reason}}"),
            stacked=True,
        ),
    ]
