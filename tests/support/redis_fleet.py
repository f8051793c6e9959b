"""Several real Redis servers for tests: a Redis Cluster, or a master with replicas and Sentinels that watch it."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.retry import Retry

from quire.ops.local.embedded_redis import find_redis_server
from quire.shared.process.processes import dying_with_parent
from quire.shared.protocol.keys import LaneKeys

SLOTS = 16384
SERVICE = "queue"
# The silence of a server, in ms, after which another server takes over.
DOWN_AFTER_MS = 1000


def wait(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    """Wait until `condition()` holds; a server that does not answer counts as no."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (RedisError, OSError):
            pass
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def slot_of(lane: str) -> int:
    return int(key_slot(LaneKeys(lane).load.encode()))


class Node:
    """One server on its own port. A test can kill the server and start it again with its data."""

    def __init__(self, folder: Path, *options: str, sentinel: bool = False) -> None:
        self.port = _free_port_of_a_node()
        self.folder = folder / str(self.port)
        self.folder.mkdir()
        self._sentinel = sentinel
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Redis(port=self.port, socket_timeout=2, retry=Retry(NoBackoff(), 0), protocol=2)

    def start(self) -> Node:
        config = self.folder / "redis.conf"
        if not config.exists():  # a Sentinel writes what it learns into it
            lines = [f"port {self.port}", "bind 127.0.0.1", f'dir "{self.folder}"', *self._options]
            if not self._sentinel:
                lines += ['save ""', "appendonly yes", "repl-diskless-sync yes", "repl-diskless-sync-delay 0"]
            config.write_text("\n".join(lines) + "\n")
        command = [find_redis_server(), str(config), *(["--sentinel"] if self._sentinel else [])]
        self.process = subprocess.Popen(dying_with_parent(command), stdout=subprocess.DEVNULL)
        wait(self.client.ping)
        return self

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self.client.close()

    def ask(self, *command: str | int) -> Any:
        """Return the raw reply with decoded bulk strings. redis-py has some of these commands under other names."""
        reply: Any = self.client.execute_command(*command)
        return reply.decode() if isinstance(reply, bytes) else reply

    def info(self, section: str) -> dict[str, Any]:
        found: Any = self.client.info(section)
        return dict(found)


class Cluster:
    """A Redis Cluster of three masters with equal shares of the slots, each with `replicas` replicas."""

    def __init__(self, folder: Path, replicas: int = 0) -> None:
        options = (
            "cluster-enabled yes",
            f"cluster-node-timeout {DOWN_AFTER_MS}",
            "cluster-require-full-coverage no",
            "cluster-replica-validity-factor 0",
        )
        self.nodes = [Node(folder, *options) for _ in range(3 * (1 + replicas))]
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])

    def start(self) -> Cluster:
        for node in self.nodes:
            node.start()
        masters, replicas = self.nodes[:3], self.nodes[3:]
        for index, node in enumerate(masters):
            node.ask("CLUSTER", "ADDSLOTS", *range(SLOTS * index // 3, SLOTS * (index + 1) // 3))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        wait(lambda: all(self._state(node)["cluster_known_nodes"] == str(len(self.nodes)) for node in self.nodes))
        for index, node in enumerate(replicas):
            node_id = self.id_of(masters[index % 3])
            wait(lambda node=node, id_=node_id: node.ask("CLUSTER", "REPLICATE", id_))  # type: ignore[misc]
        wait(lambda: all(self._state(node)["cluster_state"] == "ok" for node in self.nodes))
        for node in replicas:
            wait(lambda node=node: node.info("replication")["master_link_status"] == "up")  # type: ignore[misc]
        # Wait until every node knows the role of every other node: only then can the cluster elect a replica.
        for node in self.nodes:
            wait(lambda node=node: len(self._replicas_known(node)) == len(replicas))  # type: ignore[misc]
        return self

    def _state(self, node: Node) -> dict[str, str]:
        return dict(line.split(":", 1) for line in node.ask("CLUSTER", "INFO").split())

    def _replicas_known(self, node: Node) -> list[str]:
        return [line for line in node.ask("CLUSTER", "NODES").splitlines() if "slave" in line.split()[2]]

    def id_of(self, node: Node) -> str:
        return str(node.ask("CLUSTER", "MYID"))

    def owner(self, lane: str) -> Node:
        """Return the node that serves a lane now, and that lists itself as the master of the lane's slot."""
        slot, found = slot_of(lane), None
        for node in self.nodes:
            if node.process is None:
                continue
            for first, last, master, *_ in node.ask("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    found = next(other for other in self.nodes if other.port == master[1])
            if found is node:
                return found
        raise LookupError(f"no node has the slot of {lane}")

    def client(self, lane: str) -> Redis:
        return self.owner(lane).client

    @contextmanager
    def moving(self, slot: int, source: Node, target: Node) -> Iterator[None]:
        """Keep a slot in migration from one node to another; at the end the slot stays at its source."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        yield
        source.ask("CLUSTER", "SETSLOT", slot, "STABLE")
        target.ask("CLUSTER", "SETSLOT", slot, "STABLE")

    def move(self, slot: int, source: Node, target: Node) -> None:
        """Move a slot with all its keys."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source, *self.nodes):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    def lanes(self) -> list[str]:
        """Return the name of a lane for each of the three masters."""
        found: dict[int, str] = {}
        number = 0
        while len(found) < 3:
            lane = f"lane{number}"
            found.setdefault(3 * slot_of(lane) // SLOTS, lane)
            number += 1
        return list(found.values())

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class Watched:
    """A master, a replica, and Sentinels that promote the replica when the master fails."""

    def __init__(self, folder: Path, sentinels: int = 3, *options: str) -> None:
        master = Node(folder, *options)
        self.nodes = [master, Node(folder, *options, f"replicaof 127.0.0.1 {master.port}")]
        watch = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} {sentinels // 2 + 1}",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 6000",
        )
        self.sentinels = [Node(folder, *watch, sentinel=True) for _ in range(sentinels)]
        addresses = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis+sentinel://{addresses}/{SERVICE}/0"

    def start(self) -> Watched:
        for node in self.nodes:
            node.start()
        wait(lambda: self.nodes[1].info("replication")["master_link_status"] == "up")
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            wait(lambda sentinel=sentinel: self._knows_all(sentinel))  # type: ignore[misc]
        return self

    def cut_replica(self) -> None:
        """Disconnect the replica from its master, and keep it from connecting again."""
        master, replica = self.nodes
        replica.client.config_set("masterauth", "wrong")
        master.ask("CLIENT", "KILL", "TYPE", "replica")
        wait(lambda: replica.info("replication")["master_link_status"] == "down")

    def swap(self) -> None:
        """Swap the roles of master and replica once the replica has all writes, and tell the single Sentinel."""
        old, new = self.nodes
        written = old.info("replication")["master_repl_offset"]
        wait(lambda: new.info("replication")["slave_repl_offset"] >= written)
        new.ask("REPLICAOF", "NO", "ONE")
        (sentinel,) = self.sentinels
        sentinel.ask("SENTINEL", "REMOVE", SERVICE)
        sentinel.ask("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", new.port, 1)
        old.ask("REPLICAOF", "127.0.0.1", new.port)
        wait(lambda: old.info("replication")["master_link_status"] == "up")

    def _knows_all(self, sentinel: Node) -> bool:
        parts = [part.decode() for part in sentinel.ask("SENTINEL", "MASTER", SERVICE)]
        state = dict(zip(parts[::2], parts[1::2], strict=True))
        return (state["num-slaves"], state["num-other-sentinels"]) == ("1", str(len(self.sentinels) - 1))

    def master(self) -> Node:
        """Return the node that is master by its own report and by the report of the first Sentinel."""
        for node in self.nodes:
            if node.process is not None and node.info("replication")["role"] == "master":
                found = self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                if int(found[1]) == node.port:
                    return node
        raise LookupError("there is no master")

    def client(self, lane: str) -> Redis:
        return self.master().client

    def close(self) -> None:
        for node in (*self.sentinels, *self.nodes):
            node.close()


@contextmanager
def closing(servers: Any) -> Iterator[Any]:
    try:
        yield servers
    finally:
        servers.close()


def _free_port_of_a_node() -> int:
    """Return a port whose cluster bus port (10,000 higher) is free too, below the system's range of client ports."""
    while True:
        port = random.SystemRandom().randrange(11000, 22000)
        try:
            for number in (port, port + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            return port
        except OSError:
            continue
