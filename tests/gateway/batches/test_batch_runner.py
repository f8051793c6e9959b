"""Windows at several gateways: they share a batch, take windows over, and never write a line twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from quire.gateway.batches import batch_runner, batch_store, validation
from quire.gateway.batches.batch import BatchStatus
from quire.gateway.batches.batch_runner import BatchRunner
from quire.gateway.batches.batch_service import BATCHES
from quire.shared.messages import Delta, GenerationRequest, Outcome
from tests.gateway.batches.test_batch_service import left_in_redis
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.batch_keys import with_key
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import MODEL, RunningGateway, until

pytestmark = pytest.mark.slow


def runner_of(gateway: RunningGateway) -> BatchRunner:
    assert gateway._runner is not None
    runner = gateway._runner.app[BATCHES].runner
    assert runner is not None
    return runner


async def die(gateway: RunningGateway) -> None:
    """Stop the runner of a gateway as a kill does: it releases nothing."""
    runner = runner_of(gateway)
    tasks = [*runner._tasks, *(one.task for one in runner._open.values())]
    runner._open.clear()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "LEASE_MS", 1000)


async def test_another_gateway_takes_the_windows_of_a_dead_one_over(
    start_gateway: Start, tmp_path: Path, short_leases: None
) -> None:
    first = await start_gateway(files_dir=str(tmp_path))
    second = await start_gateway(files_dir=str(tmp_path))
    second.gateway.draining = True
    release = asyncio.Event()

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, (ord("a"),)),), None
        if request.sampling.max_tokens == 7:
            await release.wait()
        yield (Delta(0, (ord("b"),), "stop"),), Outcome("stop")

    lines = [chat_line(number, max_tokens=7 if number % 3 else 5) for number in range(200)]
    client = BatchClient(second)
    async with first.worker(script) as worker:
        batch = await BatchClient(first).create(jsonl(lines))

        async def short_lines_ended() -> bool:
            return runner_of(first)._slots_of(MODEL).taken == 128 and len(worker.claimed) >= 128

        await until(short_lines_ended)
        await die(first)
        second.gateway.draining = False
        release.set()
        batch = await client.ended(batch["id"])
        # No line has run twice.
        assert max(Counter(request.id for request in worker.claimed).values()) == 1
        assert len(worker.claimed) == 200
    assert batch["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
    output, _ = await client.outputs(batch)
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(200)]
    assert second.gateway.process.batch_meter.taken_over == 1
    assert await left_in_redis(second) == []


@pytest.mark.parametrize("place", ["end", "close"])
async def test_a_gateway_that_dies_after_it_has_written_a_window_leaves_no_line_twice(
    start_gateway: Start, tmp_path: Path, short_leases: None, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    first = await start_gateway(files_dir=str(tmp_path))
    second = await start_gateway(files_dir=str(tmp_path))
    second.gateway.draining = True
    store, reached = runner_of(first)._store, asyncio.Event()

    async def never(*_: object) -> str:
        reached.set()
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(store, place, never)
    lines = [chat_line(number) for number in range(50)]
    async with first.worker(emit([ord("a")])) as worker:
        batch = await BatchClient(first).create(jsonl(lines))
        await asyncio.wait_for(reached.wait(), 20)
        await die(first)
        second.gateway.draining = False
        batch = await BatchClient(second).ended(batch["id"])
        assert len(worker.claimed) == 50
    output, _ = await BatchClient(second).outputs(batch)
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(50)]
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert await left_in_redis(second) == []


async def test_a_gateway_that_ends_hands_its_windows_over_at_once(start_gateway: Start, tmp_path: Path) -> None:
    """With the lease of 5 seconds that real gateways have."""
    first = await start_gateway(files_dir=str(tmp_path))
    second = await start_gateway(files_dir=str(tmp_path))
    second.gateway.draining = True
    batch = await BatchClient(first).create(jsonl([chat_line(1)]))

    async def is_queued() -> bool:
        return await first.gateway.broker.queued() != (0, 0)

    await until(is_queued)
    await runner_of(first).close()
    second.gateway.draining = False
    async with first.worker(emit([ord("a")])):
        batch = await BatchClient(second).ended(batch["id"], timeout_s=3)
    assert batch["status"] == "completed"


async def test_several_gateways_share_a_batch(
    start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "WINDOW_LINES", 20)
    gateways = [await start_gateway(files_dir=str(tmp_path), batch_lines_in_flight=8) for _ in range(2)]
    lines = [chat_line(number) for number in range(300)]
    client = BatchClient(gateways[0])
    async with gateways[0].worker(emit([ord("a"), ord("b"), ord("c")])) as worker:
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
        assert len(worker.claimed) == 300
    output, _ = await client.outputs(batch)
    assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(300)]
    assert all(gateway.gateway.process.batch_meter.completed > 0 for gateway in gateways)
    assert await left_in_redis(gateways[0]) == []


async def test_batches_take_turns(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path), batch_lines_in_flight=32)
    client = BatchClient(gateway)
    long = await client.create(jsonl([chat_line(number) for number in range(600)]))
    short = await client.create(jsonl([chat_line(number) for number in range(10)]))
    async with gateway.worker(emit([ord("a")])):
        await client.ended(short["id"])
        assert (await client.show(long["id"]))["status"] == "in_progress"
        assert (await client.ended(long["id"]))["request_counts"]["completed"] == 600


async def test_a_window_that_waits_is_handed_back_only_for_one_that_is_begun(
    start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MAX_WINDOWS", 1)
    monkeypatch.setattr(batch_runner, "IDLE_S", 60.0)
    gateway = await start_gateway(files_dir=str(tmp_path))
    runner = runner_of(gateway)
    async with gateway.worker(emit([ord("a")])):
        names = []
        for project in ("one", "two"):
            client, _ = await with_key(gateway, project, requests_per_minute=1)
            names.append((await client.create(jsonl([chat_line(1), chat_line(2)])))["id"].removeprefix("batch_"))

            async def is_validated(name: str = names[-1]) -> bool:
                found = await runner._store.get(name)
                return found is not None and found.status == BatchStatus.IN_PROGRESS

            await until(is_validated)

        async def first_waits() -> bool:
            return [one.run is not None and one.run.is_idle for one in runner._open.values()] == [True]

        await until(first_waits)
        runner._tasks[0].cancel()  # windows are begun by this test alone
        await asyncio.gather(runner._tasks[0], return_exceptions=True)
        runner._open[names[0], 0].begun_at -= 60
        # Another gateway has the only window of the second batch.
        other = await runner._store.claim(names[1])
        assert other is not None
        assert not await runner._begin_one()
        assert list(runner._open) == [(names[0], 0)]
        await runner._store.release(other)
        assert await runner._begin_one()
        assert list(runner._open) == [(names[1], 0)]
        # Both wait for their limits: the place stays where it is for a while, and then they take turns.
        runner._open[names[1], 0].begun_at -= 60
        await until(first_waits)
        assert not await runner._begin_one()
        runner._handed_back[names[0]] -= 60
        assert await runner._begin_one()
        assert list(runner._open) == [(names[0], 0)]
