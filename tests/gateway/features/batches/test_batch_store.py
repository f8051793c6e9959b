"""Records of batches, their windows, and the slots of their lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.features.batches import batch_store, window_run
from quire.gateway.features.batches.batch_store import (
    LOST,
    VALIDATION,
    BatchStore,
    LinePlace,
    StoredPart,
    Window,
    WindowCounts,
)
from quire.gateway.features.batches.files.file_store import FileStore, StorageBounds, new_file_id
from quire.gateway.features.batches.files.folder_storage import FolderStorage
from quire.gateway.features.batches.files.storage import ObjectWriter, StorageError
from quire.gateway.features.batches.slots import LineSlots, Turn
from quire.shared.protocol.keys import BATCHES_TAG
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from quire.shared.redis.clients import command_client
from quire.shared.redis.clock import unix_time
from tests.gateway.conftest import Start
from tests.gateway.features.batches.files.test_files import storage_of_gateway
from tests.gateway.features.batches.test_batch_service import left_in_redis
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import RunningGateway

# --- The life of a batch in Redis: windows, leases, fences and counts -------------------------------------------------


OWNER, NO_PART = "o", StoredPart("x", 0)
PLACES = [LinePlace(0, 1), LinePlace(100, 5), LinePlace(180, 9)]


class Stores:
    """A store of batches, and one of files with an input."""

    def __init__(self, batches: BatchStore, files: FileStore, input_id: str) -> None:
        self.batches = batches
        self.files = files
        self.input = input_id

    async def add(self, most: int = 10, owner: str = OWNER, output_expires_s: int = 0) -> str:
        batch_id = new_file_id()
        names = {"output": new_file_id(), "errors_file": new_file_id()}
        reply = await self.batches.add(
            batch_id, owner, self.input, most, 3600, endpoint="/v1/x", window="1h", **names,
            output_expires_s=output_expires_s,
        )  # fmt: skip
        return batch_id if reply == "added" else reply

    async def begun(self, output_expires_s: int = 0) -> str:
        """Return a batch with two windows."""
        batch_id = await self.add(output_expires_s=output_expires_s)
        assert await self.batches.begin(await self.claim(batch_id), PLACES, 8) == "begun"
        return batch_id

    async def claim(self, batch_id: str) -> Window:
        window = await self.batches.claim(batch_id)
        assert window is not None
        return window

    async def uses(self) -> int:
        return int(await self.batches.client.hget(self.batches.keys.file(self.input), "uses"))  # type: ignore[arg-type]


@pytest.fixture
async def stores(redis_url: str, tmp_path: object) -> AsyncIterator[Stores]:
    client = command_client(redis_url, BATCHES_TAG, connections=2)
    files = FileStore(client, FolderStorage(str(tmp_path)), StorageBounds(1000, 0, 0))
    file_id = new_file_id()
    await files.reserve(file_id, OWNER, 200)
    file = await files.complete(file_id, OWNER, 200, 0, filename="x", purpose="batch")
    yield Stores(BatchStore(client), files, file.id)
    await client.aclose()


async def test_a_batch_is_validated_then_run_window_by_window(stores: Stores) -> None:
    batches = stores.batches
    batch_id = await stores.add()
    validation = await stores.claim(batch_id)
    assert (validation.index, validation.was_begun) == (VALIDATION, False)
    assert await batches.claim(batch_id) is None
    assert await batches.begin(validation, PLACES, 8) == "begun"
    assert await batches.begin(validation, PLACES, 8) == LOST  # a repeated call does nothing
    first, second = await stores.claim(batch_id), await stores.claim(batch_id)
    assert [(one.index, one.begin, one.end) for one in (first, second)] == [(0, *PLACES[:2]), (1, *PLACES[1:])]
    assert await batches.claim(batch_id) is None
    batch = await batches.get(batch_id)
    assert batch is not None
    assert (await batches.renew(first, 2, 1))[0] == "in_progress"
    assert (await batches.get(batch_id)).shown()["request_counts"] == {"total": 8, "completed": 2, "failed": 1}  # type: ignore[union-attr]
    for window, counts in ((second, WindowCounts(4, 0, 0, 40, 4)), (first, WindowCounts(3, 1, 0, 30, 3))):
        for _ in range(2):  # repeatable: a window is counted once
            errors = StoredPart("e", counts.failed * 5)
            assert await batches.end(window, counts, StoredPart(f"w{window.index}", 10), errors) == "ended"
            shown = (await batches.get(batch_id)).shown()["request_counts"]  # type: ignore[union-attr]
            # Of the first window, what was counted takes the place of its progress.
            assert (shown["completed"], shown["failed"]) == ((6, 1) if window is second else (7, 1))
        assert await batches.close(window) == "closed"
        assert await batches.close(window) == LOST
    ended = await batches.get(batch_id)
    assert ended is not None
    assert ended.status == "completed"
    assert ended.shown()["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
    assert ended.shown()["usage"] == {"input_tokens": 70, "output_tokens": 7, "total_tokens": 77}
    assert await stores.files.parts(ended.output) == [("w0", 10), ("w1", 10)]
    assert await stores.files.parts(ended.errors_file) == [("e", 5)]
    output = await stores.files.get(ended.output, OWNER)
    assert output is not None
    assert (output.bytes, output.purpose) == (20, "batch_output")
    assert await batches.active() == []
    assert await stores.uses() == 0
    used = await batches.client.hgetall(batches.keys.used)
    assert used == {b"all": b"225", b"owner:o": b"225"}


@pytest.mark.parametrize("life_s", [0, 50])
async def test_the_times_of_a_batch_and_of_its_files_are_those_of_redis(stores: Stores, life_s: int) -> None:
    """Its output files belong to its owner, and expire when the batch says so."""
    batches, files = stores.batches, stores.files
    before, _ = await batches.client.time()
    batch_id = await stores.begun(life_s)
    for _ in range(2):
        window = await stores.claim(batch_id)
        await batches.end(window, WindowCounts(3, 1), StoredPart("w", 10), StoredPart("e", 5))
        await batches.close(window)
    batch = await batches.get(batch_id)
    after, _ = await batches.client.time()
    assert batch is not None
    shown = batch.shown()
    for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at"):
        assert before <= shown[name] <= after
    assert shown["expires_at"] == shown["created_at"] + 3600
    page = await files.page(OWNER, 10, "", oldest_first=True)
    assert page is not None
    assert set(page.ids) == {stores.input, batch.output, batch.errors_file}
    for file_id, size, kind in ((batch.output, 20, "output"), (batch.errors_file, 10, "error")):
        file = await files.get(file_id, OWNER)
        assert file is not None
        assert before <= file.created <= after
        assert file.expires == (file.created + life_s if life_s else 0)
        assert (file.bytes, file.filename) == (size, f"batch_{batch_id}_{kind}.jsonl")
        expiring = await batches.client.zscore(batches.keys.expiring, file_id)
        assert expiring == (file.expires or None)


async def test_a_window_whose_lease_has_ended_is_taken_over(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, batch_id = stores.batches, await stores.begun()
    monkeypatch.setattr(batch_store, "LEASE_MS", 1)
    old = await stores.claim(batch_id)
    ended = await unix_time(batches.client) + 0.01
    while await unix_time(batches.client) < ended:
        pass
    monkeypatch.setattr(batch_store, "LEASE_MS", 3_600_000)
    new = await stores.claim(batch_id)
    assert (new.index, new.was_begun, new.is_written) == (old.index, True, False)
    # The old gateway can neither renew, nor count, nor close.
    assert (await batches.renew(old, 0, 0))[0] == LOST
    assert await batches.end(old, WindowCounts(4), StoredPart("x", 10), NO_PART) == LOST
    assert await batches.close(old) == LOST
    assert await batches.end(new, WindowCounts(4), NO_PART, NO_PART) == "ended"
    await batches.release(new)
    newest = await stores.claim(batch_id)
    assert (newest.index, newest.is_written) == (0, True)
    assert await batches.close(newest) == "closed"
    assert (await batches.get(batch_id)).numbers["completed"] == 4  # type: ignore[union-attr]


async def test_cancelling(stores: Stores) -> None:
    batches = stores.batches
    batch_id = await stores.begun()
    window = await stores.claim(batch_id)
    assert await batches.cancel(batch_id, "another") == ("", [])
    for _ in range(2):
        assert await batches.cancel(batch_id, OWNER) == ("cancelling", [(PLACES[0], PLACES[1])])
    assert (await batches.renew(window, 0, 0))[0] == "cancelling"
    # The windows that were not begun are run as well: their lines get an error.
    other = await stores.claim(batch_id)
    for one in (window, other):
        await batches.end(one, WindowCounts(0, 4, 0), NO_PART, StoredPart("e", 1))
        await batches.close(one)
    batch = await batches.get(batch_id)
    assert batch is not None
    assert (batch.status, batch.has_output, batch.has_errors) == ("cancelled", False, True)
    assert all(batch.shown()[name] for name in ("cancelling_at", "cancelled_at"))
    assert (batch.shown()["finalizing_at"], batch.shown()["completed_at"]) == (None, None)
    assert await batches.cancel(batch_id, OWNER) == ("cancelled", [])


async def test_a_batch_whose_record_was_lost_is_dropped(stores: Stores) -> None:
    batch_id = await stores.begun()
    await stores.batches.client.delete(stores.batches.keys.batch(batch_id))
    assert await stores.batches.claim(batch_id) is None
    assert await stores.batches.active() == []


# --- Slots go to the owner that has fewest; a line that waits for a limit holds none, and keeps no other owner --------


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waits(slots: LineSlots, owner: str, count: int, batch: str = "") -> tuple[list[Turn], list[asyncio.Task[None]]]:
    turns = [slots.turn(owner, batch or owner) for _ in range(count)]
    return turns, [asyncio.create_task(turn.wait()) for turn in turns]


def with_slots(turns: list[Turn]) -> list[int]:
    return [number for number, turn in enumerate(turns) if turn.has_slot]


def nothing() -> None:
    pass


async def test_owners_take_turns() -> None:
    slots = LineSlots(4, nothing)
    many, _ = waits(slots, "a", 20)
    await settled()
    assert with_slots(many) == [0, 1, 2, 3]
    assert not slots.may_begin("a")
    assert slots.may_begin("b")
    few, _ = waits(slots, "b", 3)
    await settled()
    # The next slots go to the other owner until both have the same number.
    for number in range(3):
        many[number].accepted()
        many[number].give_back()
        await settled()
    assert with_slots(few) == [0, 1]
    assert with_slots(many) == [3, 4]
    few[0].give_back()
    await settled()
    assert with_slots(few) == [1, 2]


async def test_an_owner_that_waits_for_a_limit_holds_no_slot() -> None:
    slots = LineSlots(4, nothing)
    turns, _ = waits(slots, "a", 8)
    await settled()
    turns[0].accepted()
    for turn in turns[1:4]:
        turn.give_back(pause_s=60)
    again = [asyncio.create_task(turn.wait()) for turn in turns[1:4]]
    await settled()
    assert slots.taken == 1
    other, _ = waits(slots, "b", 3)
    await settled()
    assert with_slots(other) == [0, 1, 2]
    # The end of a line may be what the limit waits for: the owner tries its next line, and no second one.
    turns[0].give_back()
    for turn in other:
        turn.give_back()
    await settled()
    assert with_slots(turns) == [1]
    # Each line that is accepted doubles the number of lines that are tried.
    turns[1].accepted()
    await settled()
    assert with_slots(turns) == [1, 2, 3]
    assert len(again) == 3


async def test_a_pause_ends_in_time_also_with_a_single_line() -> None:
    slots = LineSlots(2, nothing)
    (turn,), tasks = waits(slots, "a", 1)
    await settled()
    turn.give_back(pause_s=0.05)
    task = asyncio.create_task(turn.wait())
    await settled()
    assert not turn.has_slot
    await asyncio.wait_for(task, 60)
    assert turn.has_slot
    turn.give_back()
    assert slots.taken == 0
    assert not slots._owners
    await asyncio.gather(*tasks)


async def test_lines_that_are_given_up_leave_nothing_behind() -> None:
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    slots = LineSlots(1, changed)
    turns, tasks = waits(slots, "a", 3)
    await settled()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    turns[0].give_back()
    assert (slots.taken, slots._owners) == (0, {})
    assert changes > 0
    # A line that gets a slot in the moment in which it is given up returns it.
    first, _ = waits(slots, "a", 1)
    second, tasks = waits(slots, "a", 1)
    await settled()
    tasks[0].cancel()
    first[0].give_back()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (slots.taken, second[0].has_slot) == (0, False)


async def test_the_lines_of_a_batch_that_has_ended_do_not_wait_any_more() -> None:
    slots = LineSlots(1, nothing)
    turns, _ = waits(slots, "a", 2, "first")
    other, others = waits(slots, "a", 1, "second")
    ended, tasks = waits(slots, "a", 3, "first")
    await settled()
    slots.let_go("first")
    await asyncio.gather(*tasks)
    assert with_slots(ended) == []
    assert with_slots(turns) == [0]
    turns[0].give_back()
    await asyncio.gather(*others)
    assert with_slots(other) == [0]


# --- A window is written as a whole, in the order of its lines, also if the storage fails meanwhile -------------------


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningGateway:
    monkeypatch.setattr(window_run, "PAUSE_S", (0.01, 0.05))
    return await start_gateway(files_dir=str(tmp_path / "files"))


async def test_lines_that_end_in_another_order_are_written_in_their_own(gateway: RunningGateway) -> None:
    ends = [asyncio.Event() for _ in range(31)]
    ends[30].set()

    async def script(request: GenerationRequest) -> Steps:
        number = request.sampling.max_tokens
        await ends[number + 1].wait()  # each line ends after the one behind it
        ends[number].set()
        yield (Delta(0, (ord("a"),), "length"),), Outcome("length")

    client = BatchClient(gateway)
    async with gateway.worker(script):
        lines = [chat_line(number, max_tokens=number) for number in range(1, 30)]
        batch = await client.ended((await client.create(jsonl(lines)))["id"])
    output, _ = await client.outputs(batch)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(1, 30)]


@pytest.mark.parametrize("place", ["begin", "middle", "end"])
async def test_a_storage_that_fails_is_tried_again(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    storage, failures = storage_of_gateway(gateway), 3
    writing = storage.writing

    class Failing:
        async def write(self, data: bytes) -> None:
            raise StorageError("full")

    @asynccontextmanager
    async def sometimes(file_id: str, name: str) -> AsyncIterator[ObjectWriter]:
        nonlocal failures
        if "-" not in name or not failures:  # an upload, or the attempt after the failures
            async with writing(file_id, name) as writer:
                yield writer
            return
        failures -= 1
        if place == "begin":
            raise StorageError("full")
        async with writing(file_id, name) as writer:
            yield writer if place == "end" else Failing()
            raise StorageError("full")

    monkeypatch.setattr(storage, "writing", sometimes)
    client = BatchClient(gateway)
    async with gateway.worker(emit([ord("a")])) as worker:
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(20)])))["id"])
        assert len(worker.claimed) == 20
    output, _ = await client.outputs(batch)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(20)]
    assert failures == 0
    assert await left_in_redis(gateway) == []
    # The output is one object; nothing is left of the attempts that failed.
    assert len([path for path in (tmp_path / "files").rglob("*") if path.is_file()]) == 2


async def test_long_answers_are_written_in_pieces(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    storage = storage_of_gateway(gateway)
    writing = storage.writing

    @asynccontextmanager
    async def watched(file_id: str, name: str) -> AsyncIterator[Any]:
        async with writing(file_id, name) as writer:
            write = writer.write

            async def noted(data: bytes) -> None:
                sizes.append(len(data))
                await write(data)

            writer.write = noted
            yield writer

    monkeypatch.setattr(storage, "writing", watched)
    monkeypatch.setattr(window_run, "CHUNK", 2000)
    client = BatchClient(gateway)
    async with gateway.worker(emit([ord("a")] * 400, step=400)):
        batch = await client.ended((await client.create(jsonl([chat_line(number) for number in range(10)])))["id"])
    output, _ = await client.outputs(batch)
    assert len(output) == 10
    assert len(sizes) > 3
