"""The chart's use of Redis, checked with a real one: the signal by which workers scale, and the configuration."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as Client
from redis.asyncio import Redis

from quire.ops.local.embedded_redis import find_redis_server
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from tests.support.charts import of_kind, render

BOUNDS = QueueBounds(requests=100, tokens=100_000)
PASSWORD = "a-password_of-20-letters"


async def test_the_signal_is_what_waits_and_runs(redis_url: str) -> None:
    """The sum of XLEN, as KEDA asks: there before any worker, and zero only when nothing is left to do."""
    triggers = of_kind(render("scale-to-zero"), "ScaledObject")["worker"]["spec"]["triggers"]
    streams = [trigger["metadata"]["stream"] for trigger in triggers]
    async with Redis.from_url(redis_url) as client:
        broker = Broker(client, "demo")

        async def need() -> int:
            return sum([await client.xlen(stream) for stream in streams])

        async def submit(request_id: str, priority_class: str) -> None:
            await broker.submit(
                request_id, b"body", Admission(gateway="g", cost=10, bounds=BOUNDS, priority_class=priority_class)
            )

        assert await need() == 0
        for request_id, priority_class in (("a", "standard"), ("b", "standard"), ("c", "batch"), ("d", "interactive")):
            await submit(request_id, priority_class)
        # No worker has been there, and so there is no group that could tell its lag.
        assert await client.xinfo_groups(streams[2]) == []
        assert await need() == 4

        await broker.create_groups()
        reader = QueueReader(client, "demo", "w")
        claims = [await broker.claim(delivery, "w", new_id()) for delivery in await reader.read(4, 0)]
        assert await need() == 4, "what runs is needed too"
        first, second, third, fourth = (claim for claim in claims if claim)

        item = StepItem(first.request_id, 0, (Delta(0, (1,), "stop"),), Outcome("stop"))
        await broker.commit_step("w", [StepCommit(first.attempt, item)])
        assert await need() == 3
        # A worker that ends hands over what it runs: it waits again.
        assert await broker.release([(second.request_id, second.attempt), (third.request_id, third.attempt)]) == 2
        assert await need() == 3
        assert await broker.cancel(second.request_id) == "cancelled"
        assert await need() == 2
        for delivery in await reader.read(4, 0):
            third = await broker.claim(delivery, "w", new_id()) or third
        for claim in (third, fourth):
            item = StepItem(claim.request_id, 0, (Delta(0, (1,), "stop"),), Outcome("stop"))
            await broker.commit_step("w", [StepCommit(claim.attempt, item)])
        assert await need() == 0


@pytest.mark.slow
def test_redis_starts_with_the_configuration_of_the_chart(tmp_path: Path) -> None:
    files: dict[str, Any] = of_kind(render("--set=redis.maxMemory=77mb"), "ConfigMap")["redis"]["data"]
    (tmp_path / "data").mkdir()
    place = tmp_path / "socket"
    # Only its places are others: those of the container are not here.
    configuration = (
        files["redis.conf"].replace("dir /data\n", f"dir {tmp_path}/data\n").replace("port 6379\n", "port 0\n")
    )
    assert configuration.count(str(tmp_path)) == 1
    (tmp_path / "redis.conf").write_text(configuration + f"unixsocket {place}\n")
    script = (
        files["start.sh"].replace("/etc/quire/", f"{tmp_path}/").replace("/tmp/redis.conf", f"{tmp_path}/started.conf")
    )
    # Redis' own client may not be here.
    (tmp_path / "redis-cli").write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/asked ] || {{ echo "LOADING" >{tmp_path}/asked; exit; }}\n'
        f'echo "$1 $REDISCLI_AUTH" >>{tmp_path}/asked\necho Background append only file rewriting started\n'
    )
    (tmp_path / "redis-cli").chmod(0o755)
    server = subprocess.Popen(
        ["sh", "-c", script],
        env={
            "PATH": f"{tmp_path}:{Path(find_redis_server()).parent}:{os.environ['PATH']}",
            "REDISCLI_AUTH": PASSWORD,
            "LC_ALL": "C",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout
        assert any("eady to accept connections" in line for line in server.stdout), "it ended while starting"
        with Client(unix_socket_path=str(place), password=PASSWORD, decode_responses=True) as client:
            wanted = {"appendonly": "yes", "appendfsync": "everysec", "save": "", "maxmemory-policy": "noeviction"}
            wanted["maxmemory"] = str(77 * 1024 * 1024)
            assert {name: client.config_get(name)[name] for name in wanted} == wanted
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(place))
            stranger.sendall(b"PING\r\n")
            assert stranger.recv(100).startswith(b"-NOAUTH")
        assert (tmp_path / "started.conf").stat().st_mode & 0o077 == 0
        assert PASSWORD not in Path(f"/proc/{server.pid}/cmdline").read_text()
        asked = f"LOADING\nbgrewriteaof {PASSWORD}\n"
        deadline = time.monotonic() + 10
        while not (tmp_path / "asked").exists() or (tmp_path / "asked").read_text() != asked:
            assert time.monotonic() < deadline, "nobody asked"
            time.sleep(0.05)
        time.sleep(1.5)  # it is asked until it has begun, and not again
        assert (tmp_path / "asked").read_text() == asked
    finally:
        server.terminate()
        server.communicate(timeout=20)


def test_a_redis_that_cannot_write_is_not_restarted() -> None:
    """Such a Redis answers PING with an error, and a restart would lose the data that it could not write."""
    probes = of_kind(render(), "StatefulSet")["redis"]["spec"]["template"]["spec"]["containers"][0]
    assert "PONG" in str(probes["readinessProbe"]["exec"]["command"])
    assert probes["livenessProbe"]["exec"]["command"] == ["redis-cli", "ping"]
