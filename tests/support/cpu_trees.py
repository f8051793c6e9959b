"""Made-up /sys and /proc trees that describe processors."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def make_tree(root: Path, nodes: list[list[list[int]]], name: str = "core_cpus_list") -> Path:
    """Describe NUMA nodes of cores of logical CPUs."""
    for number, cores in enumerate(nodes):
        cpus = sorted(cpu for core in cores for cpu in core)
        write(root, f"sys/devices/system/node/node{number}/cpulist", ",".join(map(str, cpus)))
        for core in cores:
            for cpu in core:
                place = f"sys/devices/system/cpu/cpu{cpu}/topology/{name}"
                write(root, place, ",".join(map(str, core)))
    return root


def numbered(nodes: int, cores: int, threads: int) -> list[list[list[int]]]:
    """Nodes in the usual numbering: the first hyper-threads of all cores, then the second ones."""
    total = nodes * cores
    return [
        [[node * cores + core + total * thread for thread in range(threads)] for core in range(cores)]
        for node in range(nodes)
    ]
