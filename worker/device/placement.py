"""Places the compute threads of a worker: how many, on which cores, and how many ranks share a model by default.

One thread per physical core computes: two hyper-threads of a core share its vector units. On a machine with several
NUMA nodes each rank has the cores of one node, and its memory there, because Linux takes memory from the node of the
thread that first writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from quire.worker.device.topology import Core, Topology, format_cpus

# Fewer cores than these are shared with the gateway, Redis and the event loop: bound threads could not make way.
LEAST_CORES_TO_BIND = 4


@dataclass(frozen=True, slots=True)
class Placement:
    """The threads of one process.

    cpus: all that the process may use; empty for no change. bound: the CPUs of each thread; empty if threads are not
    bound. nodes: nodes over which memory is spread, if the process uses several.
    """

    threads: int
    cpus: tuple[int, ...] = ()
    bound: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.threads} thread" + ("s" if self.threads > 1 else "")
        if self.bound:
            text += ", each bound to a core,"
        if self.cpus:
            text += f" on CPUs {format_cpus(self.cpus)}"
        if self.nodes:
            text += f", memory spread over nodes {format_cpus(self.nodes)}"
        return text


def default_ranks(topology: Topology, fits: Callable[[int], bool]) -> int:
    """Return the ranks of --tensor-parallel-size 0: one per NUMA node, or the most that share the model, or 1.

    fits: returns whether the model can be shared by a number of ranks. Nodes are grouped evenly, so the number divides
    that of the nodes.
    """
    nodes = len(topology.nodes)
    if topology.quota < len(topology.cores):  # the container's share of the machine is not that of whole nodes
        return 1
    return next(size for size in range(nodes, 0, -1) if size == 1 or (nodes % size == 0 and fits(size)))


def place(topology: Topology, threads: int = 0, ranks: int = 1, rank: int = 0, binding: str = "auto") -> Placement:
    """Place the threads of a rank.

    threads: of all ranks together; 0 is one per physical core, within the quota of the container. binding: "cores"
    binds each thread to its core; "none" never does; "auto" does if the threads use all cores of the rank, and these
    are at least LEAST_CORES_TO_BIND.
    """
    cores = _cores_of(topology, ranks, rank)
    share = max(1, int(min(topology.quota, 2**20) // ranks))
    count = max(1, threads // ranks) if threads else min(len(cores), share)
    if binding == "none":
        return Placement(count)
    is_restricted = topology.quota < len(topology.cores)
    fills = count == len(cores) and len(cores) >= LEAST_CORES_TO_BIND and not is_restricted
    bound = tuple(core.cpus for core in cores[:count]) if fills or (binding == "cores" and count <= len(cores)) else ()
    nodes = tuple(dict.fromkeys(core.node for core in cores))
    # Threads of ranks that share one node, or are too many for the cores, may use all of the rank's CPUs.
    is_apart = ranks > 1 and len(topology.nodes) > 1
    cpus = tuple(sorted(chain.from_iterable(core.cpus for core in cores))) if bound or is_apart else ()
    return Placement(count, cpus, bound, nodes if len(nodes) > 1 and not is_restricted else ())


def _cores_of(topology: Topology, ranks: int, rank: int) -> tuple[Core, ...]:
    """Return the cores of a rank: whole nodes, or a part of a node if there are more ranks than nodes.

    All cores if there are fewer than ranks.
    """
    cores, nodes = topology.cores, list(topology.nodes.values())
    if len(cores) < ranks:
        return cores
    if ranks <= len(nodes):
        mine = nodes[len(nodes) * rank // ranks : len(nodes) * (rank + 1) // ranks]
        return tuple(chain.from_iterable(mine))
    if ranks % len(nodes) == 0 and all(len(node) >= ranks // len(nodes) for node in nodes):
        each = ranks // len(nodes)
        node, at = nodes[rank // each], rank % each
        return node[len(node) * at // each : len(node) * (at + 1) // each]
    return cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]
