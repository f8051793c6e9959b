"""Checks before `quire serve` starts any process. Each raises an error of one line with the remedy."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from quire.ops.local.embedded_redis import running_url
from quire.ops.local.ports import free_port
from quire.ops.local.processes import FileLock, is_running
from quire.shared.config.command_line import CommandError
from quire.shared.redis.url import DEFAULT_REDIS_URL

# Written into the lock instead of a URL if Redis is a child of `quire serve`.
EMBEDDED = "embedded"
# A holder that wrote nothing into the lock is a `quire keys`, which ends soon, or a `quire serve` that begins.
SHORT_HOLD_S = 10.0
MAX_LOCK_BYTES = 4096


def lock_state_dir(state_dir: Path) -> FileLock:
    """Lock the state folder. Raise CommandError if it cannot be written, or if another server holds it."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(state_dir / "lock")
    except OSError as error:
        raise CommandError(
            f"cannot write to the state folder {state_dir}: {error.strerror}; pass --state-dir with a folder of yours"
        ) from error
    if not lock.acquire() and (lock.read() or not lock.acquire(SHORT_HOLD_S)):
        holder = read_holder(lock.read())
        lock.close()
        raise CommandError(
            f"another quire serve (pid {holder.pid or 'unknown'}, {holder.url or 'starting'}) uses {state_dir}; stop "
            f"it with `quire stop --state-dir {shlex.quote(str(state_dir))}`, or pass another --state-dir"
        )
    return lock


class Holder(NamedTuple):
    """What a `quire serve` writes into its lock: pid, URL, URL of its Redis or EMBEDDED, and names of its models."""

    pid: str
    url: str
    redis_url: str
    models: str


def read_holder(text: str) -> Holder:
    """Return what a `quire serve` wrote into its lock; parts not yet written are empty."""
    return Holder(*[*text.split(), "", "", "", ""][:4])


def read_lock(path: Path) -> Holder:
    """Return what a lock holds; empty parts if the file is no regular one, or does not exist. Raise OSError.

    Other programs have files of the same name, of any kind and size, so at most MAX_LOCK_BYTES are read.
    """
    if not path.is_file():
        return read_holder("")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_holder(os.read(fd, MAX_LOCK_BYTES).decode(errors="replace"))
    finally:
        os.close(fd)


def find_redis(state_dir: Path) -> str | None:
    """Return the URL of the Redis of the `quire serve` that runs with this state folder; None if none is known."""
    try:
        holder = read_lock(state_dir / "lock")
        if not holder.pid.isdecimal() or not is_running(int(holder.pid)):
            return None
        return running_url(state_dir) if holder.redis_url == EMBEDDED else holder.redis_url or None
    except OSError:  # the lock of another user, or Redis was not started yet
        return None


class RedisOf(NamedTuple):
    """The Redis of a command without --redis-url. where, remedy: for the error if it does not answer."""

    url: str
    where: str
    remedy: str


def redis_of(state_dir: Path) -> RedisOf:
    """Return the Redis of the `quire serve` that runs with this state folder, else that at DEFAULT_REDIS_URL."""
    if url := find_redis(state_dir):
        where = f"the Redis of the `quire serve` with the state folder {state_dir} does not answer"
        return RedisOf(url, where, "wait until that `quire serve` is ready")
    where = f"no `quire serve` runs with the state folder {state_dir}, and no Redis is at {DEFAULT_REDIS_URL}"
    remedy = (
        "start `quire serve`, pass the --state-dir (QUIRE_STATE_DIR) of a running one, or the URL of its Redis with "
        "--redis-url (QUIRE_REDIS_URL)"
    )
    return RedisOf(DEFAULT_REDIS_URL, where, remedy)


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """Yield a port to listen on: `port`, or any if it is 0. Raise CommandError.

    A port that the system chose is kept from other programs until the end of the block, also while no server listens.
    The gateway gets it because servers set SO_REUSEADDR, with which Linux lets a port be shared until one of them
    listens.
    """
    with _bound(host, port) as holder:
        chosen = int(holder.getsockname()[1])
        if port or sys.platform != "linux":
            holder.close()
        yield chosen


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port on which no server listens: `port`, or any if it is 0."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CommandError(f"--host {host} is no address of this machine: {error.strerror}; try 127.0.0.1") from error
    with ExitStack() as stack:
        probe = stack.enter_context(socket.socket(family, kind))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            if port:
                probe.listen(1)
        except PermissionError as error:
            raise CommandError(f"port {port} needs the rights of root; pass a --port from 1024 to 65535") from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise CommandError(
                    f"cannot listen on {host}: {error.strerror}; pass --host 127.0.0.1, or 0.0.0.0 for every interface"
                ) from error
            free = free_port(host, family)
            raise CommandError(
                f"port {port} on {host}: {error.strerror}; pass --port {free}, or --port 0 for any free one"
            ) from error
        stack.pop_all()
        return probe


def check_redis(url: str) -> None:
    """Raise CommandError if no usable Redis answers at `url`."""
    from quire.shared.redis.check import check_redis
    from quire.shared.redis.url import BrokerUnavailable

    try:
        asyncio.run(check_redis(url))
    except BrokerUnavailable as error:
        raise CommandError(str(error)) from error
