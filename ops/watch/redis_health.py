"""The checks of a Redis by what its INFO says: version, settings, memory, persistence and clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.ops.watch.checks import Check, Verdict, found

MINIMUM_VERSION = (6, 2)
# The first release of each branch without a known hole that lets a client which may run scripts run code of its own.
# Redis: the security release of 2026-07-24 (https://github.com/docker-library/official-images/pull/21922), after
# CVE-2025-49844 and CVE-2026-23479. Valkey: https://github.com/valkey-io/valkey/releases, CVE-2026-56684 and
# CVE-2026-23479. A branch that is not listed gets no fixes, or is newer than this list.
SAFE: dict[str, dict[tuple[int, ...], int]] = {
    "Redis": {(6, 2): 23, (7, 2): 15, (7, 4): 10, (8, 2): 8, (8, 4): 5, (8, 6): 5, (8, 8): 1},
    "Valkey": {(7, 2): 13, (8, 0): 10, (8, 1): 7, (9, 0): 5, (9, 1): 1},
}
HOLES = "CVE-2025-49844 or CVE-2026-23479"
# The API and the logs name times of this machine; the queue itself uses the time of Redis alone.
MAX_CLOCK_S = 1.0
FULL = 0.8


def checks_of(info: Mapping[str, Any], difference_s: float, is_local: bool) -> list[Check]:
    """Return the checks. difference_s: of the clocks. is_local: only this user can reach the server."""
    return [_version(info, is_local), *_settings(info), _memory(info), *_state(info), _clock(difference_s)]


def _version(info: Mapping[str, Any], is_local: bool) -> Check:
    name = "Valkey" if "valkey_version" in info else "Redis"
    said = str(info.get("valkey_version") or info.get("redis_version", "0.0.0"))
    version = tuple(int(part) for part in said.split(".")[:3] if part.isdecimal())
    branch, safe = version[:2], SAFE[name]
    if name == "Redis" and branch < MINIMUM_VERSION:
        return found("redis version", f"{name} {said}", "update it: Quire needs 6.2 or later", Verdict.FAILED)
    if branch > max(safe) or version[2:] >= (safe.get(branch, 1000),):
        return found("redis version", f"{name} {said}")
    newer = next(key for key in safe if key >= branch)
    who = "only this user can reach it" if is_local else "let only Quire reach it, with a password"
    remedy = f"update it to {newer[0]}.{newer[1]}.{safe[newer]} or later; until then: {who}"
    seen = f"{name} {said} has known holes ({HOLES}): a client that may run scripts can run code"
    return found("redis version", seen, remedy)


def _settings(info: Mapping[str, Any]) -> Iterator[Check]:
    policy = info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        yield found("eviction", "maxmemory-policy is noeviction")
    else:
        seen = f"maxmemory-policy is {policy}: at the limit Redis deletes requests"
        remedy = "redis-cli CONFIG SET maxmemory-policy noeviction, and in redis.conf"
        yield found("eviction", seen, remedy, Verdict.FAILED)
    if info.get("aof_enabled"):
        yield found("persistence", "appendonly is yes")
    else:
        seen = "appendonly is no: a restart of Redis loses waiting and running requests"
        yield found("persistence", seen, "redis-cli CONFIG SET appendonly yes, and in redis.conf")


def _memory(info: Mapping[str, Any]) -> Check:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    seen = f"{used / 2**20:,.0f} MiB used" + (f" of {most / 2**20:,.0f} MiB" if most else ", no maxmemory")
    if not most or used < FULL * most:
        return found("redis memory", seen)
    remedy = "raise maxmemory, or lower --max-queued-tokens and --max-stored-bytes (docs/how-to/memory.md)"
    return found("redis memory", f"{seen}: at the limit new requests get 503", remedy)


def _state(info: Mapping[str, Any]) -> Iterator[Check]:
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if info.get(name, "ok") != "ok":
            remedy = "free disk space or memory, and read the log of Redis"
            yield found("redis disk", f"{name} is {info[name]}", remedy, Verdict.FAILED)
    if count := int(info.get("evicted_keys", 0)):
        seen = f"{count} keys were evicted since the start of Redis: requests may be lost"
        yield found("evicted keys", seen, "set maxmemory-policy noeviction", Verdict.FAILED)
    if info.get("role", "master") != "master":
        remedy = "give the URL of the master, or of the Sentinels (docs/how-to/redis.md)"
        yield found("redis role", f"it is a {info['role']}, which takes no writes", remedy, Verdict.FAILED)


def _clock(difference_s: float) -> Check:
    seen = f"this machine is {abs(difference_s):.3f} s {'before' if difference_s > 0 else 'behind'} Redis"
    remedy = "synchronise both with NTP (timedatectl set-ntp true); logs and answers name wrong times until then"
    return found("clocks", seen, remedy if abs(difference_s) > MAX_CLOCK_S else "")
