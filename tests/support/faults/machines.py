"""Machines with networks between them: namespaces of the Linux kernel, joined by virtual cables to bridges.

A cable that is down drops every packet in both directions, without a reset, an end of file or an error. Both ends keep
their connections until they notice by themselves, as with a failed switch. Creating namespaces needs root.
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

# Addresses from the range that RFC 2544 reserves for network tests. Two test processes would pick the same addresses,
# so only one test file may use this module (`--dist loadfile`).
SUBNETS = itertools.count(1)
CLONE_NEWNET = 0x40000000
REDIS_PORT = 6379


def why_not() -> str:
    """Return the reason why this host cannot create network namespaces; an empty string if it can."""
    if shutil.which("ip") is None:
        return "no `ip` (iproute2) on the PATH"
    tried = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "type", "veth"], capture_output=True, text=True, check=False
    )
    return f"network namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


def sweep() -> None:
    """Remove the namespaces of killed test runs. The name of a namespace contains the process id of its test run."""
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
    """A network: a bridge of the host. The host has the first address of the subnet."""

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
    """A machine with a cable to each of `networks`. `url` is that of the Redis on the first network.

    Machines on one network reach the host but not each other, since the host may filter packets that a bridge forwards.
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
        """Make a network that connects only this machine and `other`."""
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
        """Sockets that this thread creates in the `with` block belong to the machine, even after the block ends."""
        with Path("/proc/thread-self/ns/net").open() as here, Path(f"/run/netns/{self._namespace}").open() as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(here.fileno())

    def close(self) -> None:
        ip("netns", "del", self._namespace)  # also deletes the cables that end in the namespace


@dataclass(frozen=True)
class Cable:
    """The cable from `machine` to the machine with `address`."""

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
    """Return the connections to `address` that the host's kernel lists as established."""
    state, found = "01", 0
    wanted = socket.inet_aton(address)[::-1].hex().upper()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, status = line.split()[:4]
        found += remote.startswith(wanted) and int(local.split(":")[1], 16) == port and status == state
    return found
