"""The processors of a machine: cores with their hyper-threads, NUMA nodes, and the CPU time that the container may use.

Linux describes them in /sys and /proc. Tests read made-up trees.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its logical CPUs that this process may use (several with hyper-threads), and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores that this process may use, in the order of their nodes.

    num_cpus: logical CPUs that the process may use, those of `efficient` cores included. quota: limit of the container,
    in CPUs; infinite without one.
    """

    cores: tuple[Core, ...]
    num_cpus: int
    efficient: int = 0
    quota: float = math.inf

    @property
    def nodes(self) -> dict[int, tuple[Core, ...]]:
        """The cores of each NUMA node."""
        numbers = dict.fromkeys(core.node for core in self.cores)
        return {number: tuple(core for core in self.cores if core.node == number) for number in numbers}

    def __str__(self) -> str:
        text = f"{len(self.cores)} physical cores of {self.num_cpus} CPUs on {len(self.nodes)} NUMA nodes"
        if self.efficient:
            text += f", {self.efficient} slow cores left out"
        return text + ("" if math.isinf(self.quota) else f", quota of {self.quota:g} CPUs")


def read_topology(allowed: Collection[int] | None = None, root: Path = Path("/")) -> Topology:
    """Read the topology.

    allowed: CPUs that may be used; by default the affinity mask of this process. Slow cores of hybrid processors are
    left out if there are fast ones. A machine without a description in /sys has one node, and a core per CPU.
    """
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    system = root / "sys/devices/system"
    node_of = {cpu: number for number, cpus in _nodes(system / "node") for cpu in cpus}
    members: dict[tuple[int, ...], list[int]] = {}
    for cpu in usable:
        members.setdefault(_siblings(system / "cpu" / f"cpu{cpu}" / "topology", cpu), []).append(cpu)
    cores = [Core(tuple(cpus), node_of.get(cpus[0], 0)) for cpus in members.values()]
    slow = set(parse_cpus(_text(root / "sys/devices/cpu_atom/cpus")))
    fast = [core for core in cores if core.cpus[0] not in slow] or cores
    fast.sort(key=lambda core: (core.node, core.cpus))
    return Topology(tuple(fast), len(usable), len(cores) - len(fast), _quota(root))


def parse_cpus(text: str) -> list[int]:
    """Return the numbers of a list in Linux's format, such as `0-3,8`. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def format_cpus(cpus: Collection[int]) -> str:
    """Return the list in Linux's format of these numbers."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _nodes(folder: Path) -> Iterator[tuple[int, list[int]]]:
    for path in folder.glob("node[0-9]*"):
        yield int(path.name.removeprefix("node")), parse_cpus(_text(path / "cpulist"))


def _siblings(folder: Path, cpu: int) -> tuple[int, ...]:
    """Return the logical CPUs of the same core. The first name is of kernels before 5.1."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        if cpus := parse_cpus(_text(folder / name)):
            return tuple(cpus)
    return (cpu,)


def _quota(root: Path) -> float:
    """The CPUs that the control group of this process may use (version 2 or 1), and all groups above it."""
    quota = math.inf
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        is_second = number == "0" and not controllers
        if not is_second and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" if is_second else root / "sys/fs/cgroup/cpu"
        folder = Path(os.path.normpath(top / path.strip("/")))
        # In a container the path is that of the host, and does not exist: the group is the top.
        folders = [folder, *folder.parents] if folder.is_dir() else [top]
        for at in folders:
            if at == top or top in at.parents:
                quota = min(quota, _limit(at, is_second))
    return quota


def _limit(folder: Path, is_second: bool) -> float:
    if is_second:
        words = _text(folder / "cpu.max").split()
    else:
        words = [_text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()]
    try:
        limit, period = (int(word) for word in words)
    except ValueError:  # no file, or `max`
        return math.inf
    return limit / period if limit > 0 and period > 0 else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
