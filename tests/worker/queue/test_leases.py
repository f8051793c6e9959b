"""Leases of workers, and the watchdog."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from quire.shared.protocol.broker import Broker, new_id
from quire.shared.redis.clients import command_client
from quire.worker.engine.engine import Engine
from quire.worker.engine_runtime import EngineRuntime
from quire.worker.interpreter import FAILED
from quire.worker.queue.engine_thread import EngineThread
from quire.worker.queue.leases import NameTaken, check_name, home, is_gone, take_name
from quire.worker.queue.watchdog import Watchdog
from quire.worker.service import LeaseTimes, WorkerService
from tests.support.mock_model import EOS, MockModel, continuation
from tests.worker.test_service import KEYS, LIMITS, MODEL, Gateway, Slow

BEAT_S = 0.1


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker stops at the end of its blocking read, for which a test need not wait."""
    monkeypatch.setattr("quire.worker.queue.consumer.BLOCK_S", 0.05)


def service(redis_url: str, model: MockModel | None = None) -> WorkerService:
    engine = Engine(model or MockModel(), LIMITS, (EOS,), None)
    leases = LeaseTimes(lease_s=0.5, beat_s=BEAT_S)
    return WorkerService(EngineRuntime(engine), model_name=MODEL, worker_id="w1", redis_url=redis_url, leases=leases)


def homes() -> list[str]:
    """Return the homes of two dead processes: one ended and waited for, and one a zombie."""
    command = [sys.executable, "-c", "from quire.worker.queue.leases import home; print(home(), flush=True); input()"]
    found = []
    for _ in range(2):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        found.append((process.stdout.readline().strip(), process))
    (ended, first), (zombie, second) = found
    for process in (first, second):
        process.kill()
    first.communicate()
    os.waitid(os.P_PID, second.pid, os.WEXITED | os.WNOWAIT)  # the process has ended, and stays a zombie
    assert is_gone(zombie)
    second.communicate()
    return [ended, zombie]


@pytest.mark.skipif(sys.platform != "linux", reason="what tells processes apart is Linux's /proc")
def test_a_process_is_known_to_be_gone() -> None:
    here = home()
    host, machine, pid, started = here.split("/")
    assert not is_gone(here)
    assert all(map(is_gone, homes()))
    assert is_gone("/".join((host, machine, pid, str(int(started) + 1))))  # another process has the pid now
    # These homes do not tell whether the process has ended.
    for text in ("", "x", "/".join((host, "another machine", "1", "1")), "/".join((host, machine, "../1", "1"))):
        assert not is_gone(text)


async def test_a_second_worker_of_a_name_is_refused_and_the_first_goes_on(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        first = service(redis_url)
        task = asyncio.create_task(first.run(1.0))
        request_id = await gateway.submit((4, 2))
        assert (await gateway.result(request_id))[0] == continuation((4, 2), 8)
        for start in (service(redis_url).run(1.0), check_name(redis_url, MODEL, "w1", BEAT_S)):
            with pytest.raises(NameTaken, match=rf"'w1' is in use: process {os.getpid()} .*--worker-id"):
                await start
        request_id = await gateway.submit((5, 3))
        assert (await gateway.result(request_id))[0] == continuation((5, 3), 8)
        first.stop()
        await task
        # The name of a stopped worker is free at once.
        await check_name(redis_url, MODEL, "w1", 3600)


async def test_of_two_that_start_at_once_one_gets_the_name(redis_url: str) -> None:
    services = [service(redis_url) for _ in range(2)]
    tasks = [asyncio.create_task(one.run(1.0)) for one in services]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    assert [type(task.exception()) for task in done] == [NameTaken]
    for one in services:
        one.stop()
    for task in tasks:
        with suppress(NameTaken):
            await task


async def started(gateway: Gateway, redis_url: str) -> tuple[WorkerService, asyncio.Task[None], str]:
    """Return a worker that has served a request, its task, and its incarnation."""
    worker = service(redis_url)
    task = asyncio.create_task(worker.run(1.0))
    await gateway.result(await gateway.submit((4, 2)))
    holder = await gateway.broker.holder("w1")
    assert holder is not None
    return worker, task, holder.incarnation


async def test_one_that_was_silent_ends_when_its_name_was_taken(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway:
        _, task, incarnation = await started(gateway, redis_url)
        # A second worker that has not seen a heartbeat of the first takes the name in this way.
        assert await gateway.broker.enlist("w1", "new", "elsewhere", BEAT_S, before=incarnation)
        with pytest.raises(NameTaken, match="--worker-id"):
            await asyncio.wait_for(task, 60)
        assert (await gateway.client.hget(KEYS.worker("w1"), "incarnation")) == b"new"


async def test_its_engine_computes_no_more_when_it_has_ended(redis_url: str) -> None:
    """An engine thread inside torch would abort the process at its end."""
    async with Gateway(redis_url) as gateway:
        worker = service(redis_url, Slow(0.5))
        task = asyncio.create_task(worker.run(1.0))
        await gateway.submit((4, 2), max_tokens=50, ignore_eos=True)
        await asyncio.wait_for(gateway.listen(), 60)
        holder = await gateway.broker.holder("w1")
        assert holder is not None
        assert await gateway.broker.enlist("w1", "new", "elsewhere", BEAT_S, before=holder.incarnation)
        with pytest.raises(NameTaken):
            await asyncio.wait_for(task, 60)
        assert not [thread for thread in threading.enumerate() if isinstance(thread, EngineThread)]


@pytest.mark.skipif(sys.platform != "linux", reason="what tells processes apart is Linux's /proc")
async def test_one_that_finds_its_predecessor_again_in_redis_keeps_the_name(redis_url: str) -> None:
    """Redis came back with older data, from just after the death of the predecessor."""
    ended = (await asyncio.to_thread(homes))[0]
    async with Gateway(redis_url) as gateway:
        worker, task, incarnation = await started(gateway, redis_url)
        assert await gateway.broker.enlist("w1", "dead", ended, BEAT_S, before=incarnation)
        async with asyncio.timeout(60):
            while not await gateway.broker.live_workers() and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        worker.stop()
        await task


async def test_the_name_of_a_dead_process_is_free_at_once_and_of_a_silent_one_soon(redis_url: str) -> None:
    client = command_client(redis_url)
    try:
        broker = Broker(client, MODEL)
        ended = (await asyncio.to_thread(homes))[0]
        assert await broker.enlist("w1", "dead", ended, 3600)
        await take_name(broker, "w1", new_id(), 3600)  # a wait for heartbeats would last for hours
        assert await broker.enlist("w2", "silent", "host/machine/1/1", BEAT_S)
        await take_name(broker, "w2", "next", BEAT_S)
        holder = await broker.holder("w2")
        assert holder is not None
        assert holder.incarnation == "next"
    finally:
        await client.aclose()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of the process; exiting ends the calling thread only."""
    codes: list[int] = []

    def exit_process(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_process)
    return codes


def test_an_engine_that_does_not_tick_ends_the_process(exits: list[int]) -> None:
    engine: Any = SimpleNamespace(ticks=3)
    with pytest.raises(SystemExit):
        Watchdog(engine, 0.04).run()
    assert exits == [FAILED]


class Ticking:
    """An engine that has moved whenever it is looked at."""

    def __init__(self) -> None:
        self._looks = itertools.count()
        self.was_seen = threading.Event()

    @property
    def ticks(self) -> int:
        looks = next(self._looks)
        if looks >= 15:
            self.was_seen.set()
        return looks


def test_an_engine_that_ticks_is_left_alone(exits: list[int]) -> None:
    engine = Ticking()
    watchdog = Watchdog(engine, 0.04)  # type: ignore[arg-type]
    watchdog.start()
    assert engine.was_seen.wait(60)  # for three times the limit
    watchdog.stop()
    watchdog.join(60)
    assert exits == []


def test_zero_switches_it_off() -> None:
    engine: Any = SimpleNamespace(ticks=0)
    before = threading.active_count()
    Watchdog(engine, 0.0).start()
    assert threading.active_count() == before
