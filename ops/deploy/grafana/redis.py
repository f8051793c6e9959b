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
            "1 while Redis answers its exporter; at 0 no call is accepted and streams pause: restart Redis, its "
            "append-only file holds the queue.",
            Line(f"min({of('redis_up')})", "up"),
            Thresholds(1, 0.5, below=True),
        ),
        stat(
            "Evicted keys",
            "short",
            "Keys that Redis has evicted since its start; every evicted key is lost work: set `maxmemory-policy "
            "noeviction`.",
            Line(f"sum({of('redis_evicted_keys_total')})", "evicted"),
            Thresholds(1, 1),
        ),
        stat(
            "Persistent",
            "short",
            "1 if the append-only file is on and the last write succeeded; at 0 a restart loses waiting and running "
            "requests: set `appendonly yes`, check the disk.",
            Line(f"min({of('redis_aof_enabled')} * {of('redis_aof_last_write_status')})", "persistent"),
            Thresholds(1, 0.5, below=True),
        ),
        stat(
            "Commands",
            "ops",
            "Commands per second; a single core executes them, so above some ten thousand watch its CPU.",
            Line(rate("redis_commands_processed_total"), "commands/s"),
        ),
        stat(
            "Memory used",
            "bytes",
            "Memory of data and buffers; near `maxmemory` writes are refused: raise it, or lower the limits of the "
            "queue.",
            Line(f"sum({of('redis_memory_used_bytes')})", "used"),
        ),
        stat(
            "Uptime",
            "s",
            "Time since Redis started; if it restarted without your doing, read its log for the reason.",
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
            "The ten most frequent commands; `evalsha` are the scripts of the queue. If other commands dominate, "
            "other applications use this Redis: give them their own.",
            Line(f"topk(10, {rate('redis_commands_total', by='cmd')})", "{{cmd}}"),
        ),
        series(
            "Mean time of a command",
            "s",
            "Mean time inside Redis of the ten slowest commands; scripts above a millisecond delay all clients: look "
            "for huge batches or a busy machine.",
            Line(f"topk(10, {share(command_s, rate('redis_commands_total', by='cmd'))})", "{{cmd}}"),
            limits=Thresholds(0.001, 0.01),
        ),
        series(
            "CPU",
            "percentunit",
            "Share of a core that Redis uses; near 1 it is the bottleneck: distribute models over several Redis "
            "servers, or commit less often with larger batches.",
            Line(f"{cpu_s} + {system_s}", "{{instance}}"),
            limits=Thresholds(0.6, 0.85),
        ),
        series(
            "Clients",
            "short",
            "Connections, connections blocked in a read, and refused connections per second; refused ones mean that "
            "`maxclients` is too low or that a client leaks connections.",
            Line(f"sum({of('redis_connected_clients')})", "connected"),
            Line(f"sum({of('redis_blocked_clients')})", "blocked"),
            Line(rate("redis_rejected_connections_total"), "refused/s"),
        ),
        series(
            "Network",
            "Bps",
            "Bytes in and out per second; output grows with streams and gateways. Near the limit of the link, move "
            "some models to another Redis.",
            Line(rate("redis_net_input_bytes_total"), "in"),
            Line(rate("redis_net_output_bytes_total"), "out"),
        ),
        series(
            "Slow commands",
            "short",
            "Entries of the slow log, and duration of the latest entry; `SLOWLOG GET` lists the commands.",
            Line(f"max({of('redis_slowlog_length')})", "entries"),
            Line(f"max({of('redis_last_slow_execution_duration_seconds')})", "last, seconds"),
        ),
    ]


def _persistence() -> list[Panel]:
    return [
        series(
            "Memory",
            "bytes",
            "Data, resident memory of the process, and the limit (0: none); if the used memory nears the limit, "
            "writes are refused and no call is accepted: raise `maxmemory`.",
            Line(f"sum by (instance) ({of('redis_memory_used_bytes')})", "used {{instance}}"),
            Line(f"sum by (instance) ({of('redis_memory_used_rss_bytes')})", "resident {{instance}}"),
            Line(f"sum by (instance) ({of('redis_memory_max_bytes')})", "limit {{instance}}"),
        ),
        series(
            "Append-only file",
            "bytes",
            "Size of the append-only file now and after its last rewrite; if it grows without rewrites, the disk "
            "fills: check whether rewriting fails.",
            Line(f"sum by (instance) ({of('redis_aof_current_size_bytes')})", "size {{instance}}"),
            Line(f"sum by (instance) ({of('redis_aof_base_size_bytes')})", "after rewrite {{instance}}"),
        ),
        series(
            "State of persistence",
            "short",
            "1 if the append-only file is on, if its last write succeeded, and if its last rewrite succeeded; "
            "delayed syncs are a count. If they grow, the disk is too slow or too busy.",
            Line(f"min({of('redis_aof_enabled')})", "on"),
            Line(f"min({of('redis_aof_last_write_status')})", "written"),
            Line(f"min({of('redis_aof_last_bgrewrite_status')})", "rewritten"),
            Line(f"sum({of('redis_aof_delayed_fsync')})", "late syncs"),
        ),
        series(
            "Fork",
            "s",
            "Duration of the last fork, during which Redis answers no command; above a tenth of a second, disable "
            "huge pages or keep less data.",
            Line(f"max by (instance) ({of('redis_latest_fork_seconds')})", "{{instance}}"),
            limits=Thresholds(0.05, 0.2),
        ),
        series(
            "Replicas",
            "short",
            "Connected replicas; if there are fewer than you run, a failover now would lose more data.",
            Line(f"sum by (instance) ({of('redis_connected_slaves')})", "{{instance}}"),
        ),
        series(
            "Fragmentation",
            "short",
            "Resident memory divided by data; only relevant for large data: above 1.5 with several gigabytes, "
            "restart Redis at a quiet time.",
            Line(f"max by (instance) ({of('redis_mem_fragmentation_ratio')})", "{{instance}}"),
        ),
    ]


def _keys() -> list[Panel]:
    return [
        series(
            "Keys",
            "short",
            "All keys, and keys that expire, such as logs of ended requests; if they grow steadily although requests "
            "end, report it.",
            Line(f"sum({of('redis_db_keys')})", "all"),
            Line(f"sum({of('redis_db_keys_expiring')})", "expiring"),
        ),
        series(
            "Streams of the lanes",
            "short",
            "Entries of each lane's queue streams (waiting and running) and of its dead-letter stream; if they only "
            "grow, workers are missing: see the queue board.",
            Line(
                f"sum by (model) ({OVER_GATEWAYS} (quire_queue_requests)) + max by (model) (quire_lane_running)",
                "queue {{model}}",
            ),
            Line("max by (model) (quire_lane_dead)", "dead {{model}}"),
        ),
        series(
            "Keys that went",
            "ops",
            "Keys that expired, which is normal, and keys that were evicted, which must not happen: set "
            "`maxmemory-policy noeviction`.",
            Line(rate("redis_expired_keys_total"), "expired"),
            Line(rate("redis_evicted_keys_total"), "evicted"),
        ),
    ]
