"""The processors and memory of a machine, and where ranks are placed."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from quire.worker import host_memory as memory
from quire.worker.device.placement import Placement, default_ranks, place
from quire.worker.device.topology import Core, Topology, format_cpus, parse_cpus, read_topology
from quire.worker.host_memory import available_memory, of_container

# --- cpu trees --------------------------------------------------------------------------------------------------------
# Made-up /sys and /proc trees that describe processors.


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


# --- topologies of made-up machines and containers, and of this machine -----------------------------------------------


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


# --- threads, cores and ranks on made-up machines ---------------------------------------------------------------------


def machine(nodes: int, cores: int, threads: int = 2, quota: float = math.inf) -> Topology:
    made = numbered(nodes, cores, threads)
    all_cores = tuple(Core(tuple(cpus), number) for number, node in enumerate(made) for cpus in node)
    return Topology(all_cores, nodes * cores * threads, 0, quota)


def test_one_thread_per_physical_core_each_bound_to_it() -> None:
    placement = place(machine(1, 4))
    assert placement == Placement(4, tuple(range(8)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    assert str(placement) == "4 threads, each bound to a core, on CPUs 0-7"


def test_threads_of_a_small_machine_are_not_bound() -> None:
    assert place(machine(1, 2, 1)) == Placement(2)
    assert str(place(machine(1, 1, 1))) == "1 thread"
    assert place(machine(1, 2), binding="cores").bound == ((0, 2), (1, 3))


def test_threads_that_leave_cores_to_others_are_not_bound() -> None:
    """Two workers with half of the cores each would otherwise be bound to the same half."""
    assert place(machine(1, 8), threads=4) == Placement(4)
    assert place(machine(1, 8), threads=16) == Placement(16), "more threads than cores"
    assert place(machine(1, 8), threads=4, binding="cores").bound == ((0, 8), (1, 9), (2, 10), (3, 11))
    assert place(machine(1, 8), threads=16, binding="cores").bound == ()


def test_nothing_is_bound_on_request() -> None:
    assert place(machine(2, 8), ranks=2, rank=1, binding="none") == Placement(8)


@pytest.mark.parametrize(("quota", "threads"), [(2.5, 2), (0.5, 1), (8, 8), (64, 8)])
def test_a_quota_bounds_the_threads(quota: float, threads: int) -> None:
    placement = place(machine(1, 8, quota=quota))
    assert placement.threads == threads
    assert bool(placement.bound) == (quota >= 8)
    assert place(machine(1, 8, quota=quota), ranks=2).threads == max(1, min(4, int(quota // 2)))


def test_a_rank_has_the_cores_of_its_node() -> None:
    for rank in range(2):
        placement = place(machine(2, 4), ranks=2, rank=rank)
        assert placement.threads == 4
        assert placement.bound == tuple((4 * rank + at, 8 + 4 * rank + at) for at in range(4))
        assert placement.nodes == ()


def test_every_core_belongs_to_exactly_one_rank() -> None:
    for nodes, cores, ranks in [
        (4, 6, 4),
        (4, 6, 2),
        (2, 6, 4),
        (2, 6, 12),
        (1, 8, 3),
        (4, 3, 6),
        (2, 5, 4),
        (3, 4, 2),
    ]:
        topology = machine(nodes, cores)
        taken = [place(topology, ranks=ranks, rank=rank, binding="cores").bound for rank in range(ranks)]
        assert sorted(cpus for bound in taken for cpus in bound) == sorted(core.cpus for core in topology.cores)
        assert max(map(len, taken)) - min(map(len, taken)) <= cores, (nodes, cores, ranks)


def test_more_ranks_than_cores_share_all_of_them() -> None:
    assert place(machine(1, 2), ranks=4, rank=3) == Placement(2)


def test_ranks_with_few_threads_stay_on_their_node() -> None:
    placement = place(machine(2, 8), threads=4, ranks=2, rank=1)
    assert placement.threads == 2
    assert placement.cpus == (*range(8, 16), *range(24, 32))
    assert placement.bound == ()


def test_a_process_on_several_nodes_spreads_its_memory() -> None:
    placement = place(machine(2, 4))
    assert placement.nodes == (0, 1)
    assert str(placement) == "8 threads, each bound to a core, on CPUs 0-15, memory spread over nodes 0-1"
    assert place(machine(4, 4), ranks=2, rank=1).nodes == (2, 3)


@pytest.mark.parametrize(
    ("topology", "possible", "ranks"),
    [
        (machine(1, 8), range(65), 1),
        (machine(2, 8), range(65), 2),
        (machine(4, 8), range(65), 4),
        (machine(4, 8), (1, 2, 3), 2),
        (machine(4, 8), (1, 3, 9), 1),
        (machine(3, 8), (1, 2), 1),
        (machine(2, 8, quota=16), range(65), 2),
        (machine(2, 8, quota=4), range(65), 1),
    ],
)
def test_one_rank_per_node_if_the_model_can_be_shared(topology: Topology, possible: range, ranks: int) -> None:
    assert default_ranks(topology, lambda size: size in possible) == ranks


# --- the memory that a worker may plan with: that of the machine, within the limit of the container -------------------

MIB = 1024**2


def write_files(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_inactive_page_cache_counts_as_free(tmp_path: Path) -> None:
    write_files(tmp_path, memory__max=f"{100 * MIB}\n", memory__current=f"{70 * MIB}\n")
    write_files(tmp_path, memory__stat=f"anon 1\ninactive_file {20 * MIB}\nactive_file 7\n")
    assert of_container(tmp_path) == 50 * MIB


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    write_files(
        tmp_path / "memory",
        memory__limit_in_bytes=f"{100 * MIB}\n",
        memory__usage_in_bytes=f"{70 * MIB}\n",
        memory__stat=f"inactive_file 5\ntotal_inactive_file {10 * MIB}\n",
    )
    assert of_container(tmp_path) == 40 * MIB


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    write_files(tmp_path, memory__max="10\n", memory__current="20\n", memory__stat="inactive_file 5\n")
    assert of_container(tmp_path) == 0


def test_no_limit(tmp_path: Path) -> None:
    assert of_container(tmp_path) == sys.maxsize, "no control groups at all"
    write_files(tmp_path, memory__max="max\n", memory__current="20\n", memory__stat="inactive_file 5\n")
    assert of_container(tmp_path) == sys.maxsize


def test_the_smaller_of_machine_and_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    assert 100 * MIB < available_memory() < sys.maxsize
    write_files(tmp_path, memory__max=f"{10 * MIB}\n", memory__current="0\n", memory__stat="")
    assert available_memory() == 10 * MIB
