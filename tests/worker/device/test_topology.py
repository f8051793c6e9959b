"""Topologies of made-up machines and containers, and of this machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from quire.worker.device.topology import Core, Topology, format_cpus, parse_cpus, read_topology
from tests.support.cpu_trees import make_tree, numbered, write


def test_hyper_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    topology = read_topology(range(8), make_tree(tmp_path, numbered(1, 4, 2)))
    assert topology == Topology((Core((0, 4)), Core((1, 5)), Core((2, 6)), Core((3, 7))), 8)
    assert str(topology) == "4 physical cores of 8 CPUs on 1 NUMA nodes"


def test_the_older_name_of_siblings_is_read(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, numbered(1, 2, 2), "thread_siblings_list")
    assert [core.cpus for core in read_topology(range(4), tree).cores] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("nodes", [2, 4])
def test_cores_belong_to_their_nodes(tmp_path: Path, nodes: int) -> None:
    topology = read_topology(range(nodes * 6), make_tree(tmp_path, numbered(nodes, 3, 2)))
    assert list(topology.nodes) == list(range(nodes))
    assert [core.cpus[0] for core in topology.nodes[nodes - 1]] == [nodes * 3 - 3, nodes * 3 - 2, nodes * 3 - 1]


def test_slow_cores_of_a_hybrid_processor_are_left_out(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, [[[0, 1], [2, 3], [4], [5], [6], [7]]])
    write(tree, "sys/devices/cpu_core/cpus", "0-3")
    write(tree, "sys/devices/cpu_atom/cpus", "4-7")
    topology = read_topology(range(8), tree)
    assert [core.cpus for core in topology.cores] == [(0, 1), (2, 3)]
    assert str(topology) == "2 physical cores of 8 CPUs on 1 NUMA nodes, 4 slow cores left out"
    assert [core.cpus for core in read_topology([4, 6], tree).cores] == [(4,), (6,)], "a mask of slow cores only"


def test_the_mask_of_the_process_bounds_the_cores(tmp_path: Path) -> None:
    topology = read_topology([1, 5, 7, 12], make_tree(tmp_path, numbered(2, 4, 2)))
    # CPU 1 of node 0; 5 and 7 of node 1; 12 is the second thread of core 4 of node 1.
    assert topology.nodes == {0: (Core((1,), 0),), 1: (Core((5,), 1), Core((7,), 1), Core((12,), 1))}


def test_without_a_description_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert read_topology([0, 3], tmp_path) == Topology((Core((0,)), Core((3,))), 2)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "400000 100000"}, 4),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/of/the/host", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"proc/self/cgroup": "0::/../../x", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "5:cpuacct,cpu:/d\n1:memory:/d\n0::/",
                "sys/fs/cgroup/cpu/d/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/d/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            math.inf,
        ),
        ({}, math.inf),
    ],
)
def test_the_quota_of_the_container(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    assert read_topology(range(4), tmp_path).quota == quota


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-2,8,10-11\n") == [0, 1, 2, 8, 10, 11]
    assert parse_cpus("") == []
    assert format_cpus([11, 0, 2, 1, 8, 10]) == "0-2,8,10-11"
    assert format_cpus([]) == ""


def test_this_machine_is_read() -> None:
    topology = read_topology()
    assert {cpu for core in topology.cores for cpu in core.cpus} <= os.sched_getaffinity(0)
    assert topology.num_cpus == len(os.sched_getaffinity(0))
