"""Threads, cores and ranks on made-up machines."""

from __future__ import annotations

import math

import pytest

from quire.worker.device.placement import Placement, default_ranks, place
from quire.worker.device.topology import Core, Topology
from tests.support.cpu_trees import numbered


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
