"""Memory of the host: what the machine has available, within the limit of the container."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that can be used without swapping (MemAvailable), within the control group's limit."""
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
    """Return the bytes that the limit of the control group (version 2 or 1) leaves; sys.maxsize without a limit.

    The inactive page cache counts as free, since the kernel drops it when memory is short.
    """
    for limit, used, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            left = int((cgroups / limit).read_text()) - int((cgroups / used).read_text())
            stat = (cgroups / used).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # no such file, or its content is "max"
            continue
        counts = dict(line.split() for line in stat.splitlines())
        return max(0, left + int(counts.get(unused, 0)))
    return sys.maxsize
