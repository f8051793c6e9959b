"""What workers compute and what their blocks are used for; what they take over from each other."""

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
        rows={"Batches": _batches(), "KV cache": _blocks(), "Giving way": _pressure(), "Recovery": _recovery()},
        instances='label_values(quire_build_info{process="worker"}, instance)',
    )


def _batches() -> list[Panel]:
    return [
        series(
            "Batch size",
            "short",
            "Mean sequences in a step, per worker; small batches under load mean that blocks or `--max-num-seqs` run "
            "out first.",
            Line(mean("quire_step_sequences", by="instance"), "{{instance}}"),
        ),
        series(
            "Tokens per step",
            "short",
            "Mean tokens of steps that had any of the phase; decodes are the batch, prefills at the budget of a step "
            "(`--max-num-batched-tokens`) mean that prompts queue up.",
            Line(mean("quire_step_tokens", by="phase"), "{{phase}}"),
        ),
        series(
            "Tokens computed",
            TOKENS_PER_SECOND,
            "Tokens per second by phase, recomputed ones too; prefill far above the prompts that come in are "
            "preemptions.",
            Line(rate("quire_engine_tokens_total", by="phase"), "{{phase}}"),
            stacked=True,
        ),
        series(
            "Sequences",
            "short",
            "Sequences in the engines by state; if `waiting` or `swapped` stay up, requests do not fit: see blocks.",
            Line(f"sum by (state) ({of('quire_sequences')})", "{{state}}"),
            stacked=True,
        ),
        series(
            "Steps",
            "ops",
            "Steps per second and worker; if one is at 0 while it holds leases, its engine hangs: its `/health` says "
            "why.",
            Line(rate("quire_engine_steps_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Prompt tokens that a step may take",
            "short",
            "Budget for prompts beside decodes, as learned from `--itl-target-ms` or as set; at its minimum, prompts "
            "wait for the sake of streams.",
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
            "All blocks: used, cached for prefixes, free; if used take all of them, raise `--kv-cache-gb` or lower "
            "`--max-num-seqs`.",
            Line(f"sum by (state) ({_blocks_of('used|cached|free')})", "{{state}}"),
            stacked=True,
        ),
        series(
            "In use",
            "percentunit",
            "Used blocks as a share of all, per worker; near 1 requests give way to each other.",
            Line(f"{used} / sum by (instance) ({of('quire_kv_capacity_blocks')})", "{{instance}}"),
            limits=Thresholds(0.85, 0.95),
        ),
        series(
            "Shared and pinned blocks",
            "short",
            "Used blocks in two tables or more, those pinned, and what sharing saves; if nothing is shared though "
            "prompts begin alike, look for what differs early in them.",
            Line(f"sum({_blocks_of('shared')})", "shared"),
            Line(f"sum({_blocks_of('pinned')})", "pinned"),
            Line(f"sum({of('quire_kv_sharing_saved_blocks')})", "saved by sharing"),
        ),
        series(
            "Slots of used blocks",
            "short",
            "Slots that are filled, promised to known tokens, or waste: less than a block per sequence; if waste "
            "shows, requests are much shorter than `--block-size`.",
            Line(f"sum by (state) ({of('quire_kv_slots')})", "{{state}}"),
            stacked=True,
        ),
        series(
            "Waste",
            "percentunit",
            "Slots of no token as a share of the slots of used blocks, per worker; above a tenth choose a smaller "
            "`--block-size`.",
            Line(
                f"{waste} / ({used} * sum by (instance) ({of('quire_kv_block_size_slots')}) > 0)",
                "{{instance}}",
            ),
            limits=Thresholds(0.1, 0.3),
        ),
        series(
            "Prefix cache hits",
            "percentunit",
            "Share of looked-up prompt tokens that were found and not computed; if it falls, prompts have changed at "
            "their beginning, or cached blocks are evicted: pin them or give the cache more.",
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
            "Cached blocks that made room, per second; many of them with few hits mean that the cache is too small for "
            "what comes again.",
            Line(rate("quire_prefix_cache_evictions_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Copies and forks",
            "ops",
            "Blocks copied on write, and sequences that began with the blocks of another; both come from `n`, "
            "`best_of` and beams, so ask who sends these if they cost.",
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
    ]


def _blocks_of(states: str) -> str:
    return of("quire_kv_blocks", f'state=~"{states}"')


def _pressure() -> list[Panel]:
    return [
        series(
            "Preemptions by kind",
            "ops",
            "Requests that gave way per second; if it goes on, the cache is too small for `--max-num-seqs`: raise "
            "`--kv-cache-gb` or lower the latter.",
            Line(rate("quire_preemptions_total", by="kind"), "{{kind}}"),
            stacked=True,
        ),
        series(
            "Displacements",
            "ops",
            "Preemptions by a request of a higher class; steady ones mean that the higher class alone fills the "
            "workers.",
            Line(rate("quire_displacements_total"), "displaced"),
        ),
        series(
            "Swapped blocks",
            "ops",
            "Blocks copied to host memory and back per second; what goes out must come in, else requests are stuck: "
            "see swapped sequences.",
            Line(rate("quire_swapped_blocks_total", by="direction"), "{{direction}}"),
        ),
    ]


def _recovery() -> list[Panel]:
    workers = of("quire_build_info", 'process="worker"')
    return [
        series(
            "Attempts and migrations",
            "ops",
            "Requests that workers took, and those of them that another worker had begun; migrations without a rollout "
            "mean that workers die: read their logs.",
            Line(rate("quire_attempts_total"), "attempts"),
            Line(rate("quire_migrations_total"), "migrations"),
        ),
        series(
            "Overtaken attempts",
            "ops",
            "Commits that were fenced off, and leases that had become another's: a worker was silent for longer than "
            "`--lease-s`; look for pauses, swapping hosts, or a slow Redis.",
            Line(rate("quire_fenced_commits_total"), "fenced"),
            Line(rate("quire_leases_lost_total"), "leases lost"),
        ),
        series(
            "Resends and failed commits",
            "ops",
            "Commits that Redis did not answer, and logs that had lost their end and got it again; the latter mean "
            "that Redis came back older: check its persistence.",
            Line(rate("quire_commit_failures_total"), "failed commits"),
            Line(rate("quire_log_resends_total"), "resends"),
        ),
        series(
            "Leases",
            "short",
            "Requests that each worker holds; a worker at 0 beside full ones does not claim: see its `/health`.",
            Line(f"sum by (instance) ({of('quire_leases')})", "{{instance}}"),
        ),
        series(
            "Commit latency",
            "s",
            "Time of a commit to Redis; tokens are seen only after it, so if it grows look at Redis and its disk.",
            *quantiles("quire_commit_seconds"),
            limits=Thresholds(0.05, 0.25),
        ),
        series(
            "Requests per commit, and behind",
            "short",
            "Requests in a commit, and requests with tokens that wait for the next; the latter grow while Redis is "
            "slow.",
            Line(share(rate("quire_commit_requests_total"), rate("quire_commit_seconds_count")), "per commit"),
            Line(f"sum({of('quire_uncommitted_requests')})", "uncommitted"),
        ),
        series(
            "Ended by worker",
            "reqps",
            "Requests that each worker ended per second; one far behind the others has a slower machine or fewer "
            "blocks.",
            Line(rate("quire_worker_requests_total", by="instance"), "{{instance}}"),
        ),
        series(
            "Memory of processes",
            "bytes",
            "Resident memory per worker; if it grows without end, report it with the metrics of this board.",
            Line(
                f"{of('process_resident_memory_bytes')} * on (instance) group_left (process) {workers}",
                "{{instance}}",
            ),
        ),
        series(
            "Engine loop lag, p99",
            "s",
            "p99 of how late the workers' event loops wake up; it delays commits and leases, so give the worker CPU.",
            Line(quantile(0.99, "quire_event_loop_lag_seconds", by="instance"), "{{instance}}"),
            limits=Thresholds(0.025, 0.05),
        ),
    ]
