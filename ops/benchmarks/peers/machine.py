"""Facts about the machine and the software that belong to every measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from quire.ops.paths import PROJECT_ROOT
from quire.shared.process.version import installed_version

# The processor's flags that decide which kernels a server can use.
FLAGS = ("avx", "amx", "fma", "f16c", "bmi", "sse4", "gfni")


def machine(cpuinfo: Path = Path("/proc/cpuinfo"), meminfo: Path = Path("/proc/meminfo")) -> dict[str, Any]:
    """Return processor, instructions, cores that this process may use, memory and system."""
    return {
        "processor": _field(cpuinfo, "model name") or platform.machine(),
        "flags": processor_flags(cpuinfo),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_field(meminfo, "MemTotal") or "0").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the vector and matrix instructions of the processor."""
    return sorted(flag for flag in _field(cpuinfo, "flags").split() if flag.startswith(FLAGS))


def quire_version() -> str:
    """Return the version, and in a checkout the commit."""
    git = ["git", "-C", str(PROJECT_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return " ".join([installed_version("0"), *([f"commit {commit}"] if commit else [])])


def _field(path: Path, name: str) -> str:
    """Return the value of the first line `name: value`; empty without one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
