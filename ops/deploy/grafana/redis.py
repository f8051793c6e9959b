"""The broker, as redis_exporter sees it: does it keep what it is given, and how fast."""

from __future__ import annotations

from quire.ops.deploy.grafana.panels import OVER_GATEWAYS, Board, Line, Panel, Thresholds, of, rate, series, share, stat


def board() -> Board:
    return Board(
        uid="quire-redis",
        title="Quire: Redis",
        about="Memory, clients, commands, persistence and keys of the Redis behind the lanes; needs a redis_exporter.",
        rows={"Now": _now(), "Work": _work(), "Keeping it": _persistence(), "Keys": _keys()},
        instances="label_values(redis_up, instance)",
    )


def _now() -> list[Panel]:
    return [
        stat(
            "Up",
            "short",
            "1 while Redis answers its exporter; at 0 nothing is accepted and streams pause: start it again, its "
            "append-only file has the queue.",
            Line(f"min({of('redis_up')})", "up"),
            Thresholds(1, 0.5, below=True),
        ),
        stat(
            "Evicted keys",
            "short",
            "Keys that Redis threw away, ever; any at all is lost work: set `maxmemory-policy noeviction`.",
            Line(f"sum({of('redis_evicted_keys_total')})", "evicted"),
            Thresholds(1, 1),
        ),
        stat(
            "Persistent",
            "short",
            "1 if it is on and was last written well; at 0 a restart loses what waits and runs: set `appendonly yes`, "
            "look at the disk.",
            Line(f"min({of('redis_aof_enabled')} * {of('redis_aof_last_write_status')})", "persistent"),
            Thresholds(1, 0.5, below=True),
        ),
        stat(
            "Commands",
            "ops",
            "Commands per second; one core does them all, so beyond some ten thousand watch its CPU.",
            Line(rate("redis_commands_processed_total"), "commands/s"),
        ),
        stat(
            "Memory used",
            "bytes",
            "Memory of data and buffers; if it nears `maxmemory` writes are refused: raise it, or let less wait.",
            Line(f"sum({of('redis_memory_used_bytes')})", "used"),
        ),
        stat(
            "Uptime",
            "s",
            "Time since Redis started; if it is short without your doing, read its log for the reason.",
            Line(f"min({of('redis_uptime_in_seconds')})", "uptime"),
        ),
    ]


def _work() -> list[Panel]:
    command_s = rate("redis_commands_duration_seconds_total", by="cmd")
    cpu_s = f"rate({of('redis_cpu_user_seconds_total')}[$__rate_interval])"
    system_s = f"rate({of('redis_cpu_sys_seconds_total')}[$__rate_interval])"
    return [
        series(
            "Commands by kind",
            "ops",
            "The ten most frequent commands; `evalsha` are the scripts of the queue; others in front are somebody "
            "else's: give them a Redis of their own.",
            Line(f"topk(10, {rate('redis_commands_total', by='cmd')})", "{{cmd}}"),
        ),
        series(
            "Mean time of a command",
            "s",
            "The ten slowest kinds by their mean time inside Redis; scripts above a millisecond hold up everybody: "
            "look for huge batches or a busy machine.",
            Line(f"topk(10, {share(command_s, rate('redis_commands_total', by='cmd'))})", "{{cmd}}"),
            limits=Thresholds(0.001, 0.01),
        ),
        series(
            "CPU",
            "percentunit",
            "Share of a core that Redis uses; near 1 it is the bottleneck: spread models over several, or commit less "
            "often with larger batches.",
            Line(f"{cpu_s} + {system_s}", "{{instance}}"),
            limits=Thresholds(0.6, 0.85),
        ),
        series(
            "Clients",
            "short",
            "Connections, those blocked in a read, and those refused per second; refused ones mean `maxclients` is too "
            "low or somebody leaks connections.",
            Line(f"sum({of('redis_connected_clients')})", "connected"),
            Line(f"sum({of('redis_blocked_clients')})", "blocked"),
            Line(rate("redis_rejected_connections_total"), "refused/s"),
        ),
        series(
            "Network",
            "Bps",
            "Bytes in and out per second; out grows with streams and gateways, so near the limit of the link add a "
            "Redis for some models.",
            Line(rate("redis_net_input_bytes_total"), "in"),
            Line(rate("redis_net_output_bytes_total"), "out"),
        ),
        series(
            "Slow commands",
            "short",
            "Entries of the slow log, and time of the slowest last one; `SLOWLOG GET` names them.",
            Line(f"max({of('redis_slowlog_length')})", "entries"),
            Line(f"max({of('redis_last_slow_execution_duration_seconds')})", "last, seconds"),
        ),
    ]


def _persistence() -> list[Panel]:
    return [
        series(
            "Memory",
            "bytes",
            "Data, what the process holds, and the limit (0: none); if used nears the limit, writes are refused and "
            "nothing is accepted: raise `maxmemory`.",
            Line(f"sum by (instance) ({of('redis_memory_used_bytes')})", "used {{instance}}"),
            Line(f"sum by (instance) ({of('redis_memory_used_rss_bytes')})", "resident {{instance}}"),
            Line(f"sum by (instance) ({of('redis_memory_max_bytes')})", "limit {{instance}}"),
        ),
        series(
            "Append-only file",
            "bytes",
            "Its size now and after the last rewrite; if it grows without rewrites, the disk fills: see whether "
            "rewriting fails.",
            Line(f"sum by (instance) ({of('redis_aof_current_size_bytes')})", "size {{instance}}"),
            Line(f"sum by (instance) ({of('redis_aof_base_size_bytes')})", "after rewrite {{instance}}"),
        ),
        series(
            "State of persistence",
            "short",
            "1 where the file is on, was written, was rewritten; syncs that were late count from 0: if they grow, the "
            "disk is too slow for its neighbours.",
            Line(f"min({of('redis_aof_enabled')})", "on"),
            Line(f"min({of('redis_aof_last_write_status')})", "written"),
            Line(f"min({of('redis_aof_last_bgrewrite_status')})", "rewritten"),
            Line(f"sum({of('redis_aof_delayed_fsync')})", "late syncs"),
        ),
        series(
            "Fork",
            "s",
            "Time of the last fork, in which Redis stands still; if it reaches a tenth of a second, switch huge pages "
            "off or hold less data.",
            Line(f"max by (instance) ({of('redis_latest_fork_seconds')})", "{{instance}}"),
            limits=Thresholds(0.05, 0.2),
        ),
        series(
            "Replicas",
            "short",
            "Connected replicas; fewer than you run means that a failover now would lose more.",
            Line(f"sum by (instance) ({of('redis_connected_slaves')})", "{{instance}}"),
        ),
        series(
            "Fragmentation",
            "short",
            "Resident memory over data; large only matters for large data: above 1.5 with gigabytes restart at a quiet "
            "time.",
            Line(f"max by (instance) ({of('redis_mem_fragmentation_ratio')})", "{{instance}}"),
        ),
    ]


def _keys() -> list[Panel]:
    return [
        series(
            "Keys",
            "short",
            "Keys, and those of them that expire, as logs of ended requests do; if they grow without end though "
            "requests end, report it.",
            Line(f"sum({of('redis_db_keys')})", "all"),
            Line(f"sum({of('redis_db_keys_expiring')})", "expiring"),
        ),
        series(
            "Streams of the lanes",
            "short",
            "Entries of each lane's queue streams (waiting and running) and of its stream of quarantined requests; if "
            "they only grow, workers are missing: see the queue board.",
            Line(
                f"sum by (model) ({OVER_GATEWAYS} (quire_queue_requests)) + max by (model) (quire_lane_running)",
                "queue {{model}}",
            ),
            Line("max by (model) (quire_lane_dead)", "dead {{model}}"),
        ),
        series(
            "Keys that went",
            "ops",
            "Keys that expired, as they should, and that were evicted, as they never should: set `maxmemory-policy "
            "noeviction`.",
            Line(rate("redis_expired_keys_total"), "expired"),
            Line(rate("redis_evicted_keys_total"), "evicted"),
        ),
    ]
