"""How much memory there is to use: on the machine, and in the container if that has a limit of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be used without swapping (Linux: MemAvailable), within the limit of the control group."""
    return min(_of_machine(), of_container(CGROUPS))


def _of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def of_container(cgroups: Path) -> int:
    """What the control group's limit leaves, version 2 or 1; sys.maxsize without one.

    Files that were read and are not in use count as free: the kernel drops them when memory is short.
    """
    for limit, used, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            room = int((cgroups / limit).read_text()) - int((cgroups / used).read_text())
            stat = (cgroups / used).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
        counts = dict(line.split() for line in stat.splitlines())
        return max(0, room + int(counts.get(unused, 0)))
    return sys.maxsize
