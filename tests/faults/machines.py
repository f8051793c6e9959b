"""Machines with networks between them: namespaces of the Linux kernel, joined by virtual cables to bridges.

A cable that is down loses every packet, in both directions and without a word: no reset, no end of file, no error. Both
ends keep their connections until they find out by themselves, as with a switch that fails. It needs root.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.ops.local.embedded_redis import EmbeddedRedis

# Of the range that RFC 2544 sets aside for tests of networks. Two processes would count the same: only one uses them,
# as long as one file does (`--dist loadfile`).
SUBNETS = itertools.count(1)
CLONE_NEWNET = 0x40000000
REDIS_PORT = 6379


def why_not() -> str:
    """Why there can be no machines here; empty if there can be."""
    if shutil.which("ip") is None:
        return "no `ip` (iproute2) on the PATH"
    tried = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "type", "veth"], capture_output=True, text=True, check=False
    )
    return f"network namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


def sweep() -> None:
    """Remove what test runs left that were killed: their process ids are in the names."""
    for folder, pattern, command in (
        (Path("/run/netns"), r"quire-(\d+)-", ("netns", "del")),
        (Path("/sys/class/net"), r"qb(\d+)-", ("link", "del")),
    ):
        for path in folder.iterdir() if folder.is_dir() else ():
            match = re.match(pattern, path.name)
            if match and not Path(f"/proc/{match[1]}").exists():
                ip(*command, path.name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """A bridge, on which this machine has the first address."""

    def __init__(self) -> None:
        self.subnet = f"198.18.{next(SUBNETS)}"
        self.bridge = f"qb{os.getpid()}-{self.subnet.rpartition('.')[2]}"
        self.address = f"{self.subnet}.1"
        self._hosts = itertools.count(2)
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def next_address(self) -> str:
        return f"{self.subnet}.{next(self._hosts)}"

    def close(self) -> None:
        ip("link", "del", self.bridge)


class Machine:
    """A machine with a cable to each of `networks`. `url` is that of the Redis on the first one.

    Machines on one network reach this one, and not each other: what a bridge passes on may be filtered here.
    """

    def __init__(self, name: str, *networks: Network) -> None:
        self._namespace = f"quire-{os.getpid()}-{name}"
        self._cables: dict[Network, str] = {}
        self.addresses: dict[Network, str] = {}
        self.url = f"redis://{networks[0].address}:{REDIS_PORT}/0" if networks else ""
        program = shutil.which("ip")
        assert program is not None
        self.prefix = (program, "netns", "exec", self._namespace)
        ip("netns", "add", self._namespace)
        self._inside("link", "set", "lo", "up")
        for network in networks:
            self._join(network)

    def set_end(self, end: str, state: str) -> None:
        self._inside("link", "set", end, state)

    def _inside(self, *arguments: str) -> None:
        ip("-n", self._namespace, *arguments)

    def _join(self, network: Network) -> None:
        address = network.next_address()
        end = "eth" + address.split(".")[2]
        cable = f"q{os.getpid()}-{'-'.join(address.split('.')[2:])}"
        ip("link", "add", cable, "type", "veth", "peer", "name", end, "netns", self._namespace)
        ip("link", "set", cable, "master", network.bridge, "up")
        self._inside("addr", "add", f"{address}/24", "dev", end)
        self._inside("link", "set", end, "up")
        self._cables[network], self.addresses[network] = cable, address

    def cut(self, network: Network) -> None:
        ip("link", "set", self._cables[network], "down")

    def heal(self, network: Network) -> None:
        ip("link", "set", self._cables[network], "up")

    def cable_to(self, other: Machine) -> Cable:
        """A network of these two alone."""
        subnet = f"198.18.{next(SUBNETS)}"
        cable = Cable(self, f"eth{subnet.split('.')[2]}", f"{subnet}.2")
        ip(
            "-n",
            self._namespace,
            "link",
            "add",
            cable.end,
            "type",
            "veth",
            "peer",
            "name",
            cable.end,
            "netns",
            other._namespace,
        )
        for machine, address in ((self, f"{subnet}.1"), (other, cable.address)):
            machine._inside("addr", "add", f"{address}/24", "dev", cable.end)
            machine._inside("link", "set", cable.end, "up")
        return cable

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile are that machine's, and stay so."""
        with Path("/proc/thread-self/ns/net").open() as here, Path(f"/run/netns/{self._namespace}").open() as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(here.fileno())

    def close(self) -> None:
        ip("netns", "del", self._namespace)  # and its ends of the cables, and with them the others


@dataclass(frozen=True)
class Cable:
    """From `machine` to the one that has `address` there."""

    machine: Machine
    end: str
    address: str

    def cut(self) -> None:
        self.machine.set_end(self.end, "down")

    def heal(self) -> None:
        self.machine.set_end(self.end, "up")


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class NetworkedRedis(EmbeddedRedis):
    """A Redis that listens on a network as well as on its socket."""

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder)
        self._network = network

    def _config(self) -> str:
        return super()._config() + f"bind {self._network.address}\nport {REDIS_PORT}\nprotected-mode no\n"


def half_open(address: str, port: int = REDIS_PORT) -> int:
    """Connections that this machine holds to `address` and believes to be alive."""
    state, found = "01", 0
    wanted = socket.inet_aton(address)[::-1].hex().upper()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, status = line.split()[:4]
        found += remote.startswith(wanted) and int(local.split(":")[1], 16) == port and status == state
    return found
