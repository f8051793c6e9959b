"""The life of a batch in Redis: windows, leases, fences and counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from quire.gateway.batches import batch_store
from quire.gateway.batches.batch_store import LOST, VALIDATION, BatchStore, LinePlace, StoredPart, Window, WindowCounts
from quire.gateway.files.file_store import FileStore, StorageBounds, new_file_id
from quire.gateway.files.folder_storage import FolderStorage
from quire.shared.keys import BATCHES_TAG
from quire.shared.redis.clients import command_client

OWNER, NO_PART = "o", StoredPart("x", 0)
PLACES = [LinePlace(0, 1), LinePlace(100, 5), LinePlace(180, 9)]


class Stores:
    """A store of batches, and one of files with an input."""

    def __init__(self, batches: BatchStore, files: FileStore, input_id: str) -> None:
        self.batches = batches
        self.files = files
        self.input = input_id

    async def add(self, most: int = 10, owner: str = OWNER) -> str:
        batch_id = new_file_id()
        names = {"output": new_file_id(), "errors_file": new_file_id()}
        reply = await self.batches.add(
            batch_id, owner, self.input, most, 3600, endpoint="/v1/x", window="1h", output_expires_s=0, **names
        )
        return batch_id if reply == "added" else reply

    async def begun(self) -> str:
        """Return a batch with two windows."""
        batch_id = await self.add()
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


async def test_a_window_whose_lease_has_ended_is_taken_over(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, batch_id = stores.batches, await stores.begun()
    monkeypatch.setattr(batch_store, "LEASE_MS", 1)
    old = await stores.claim(batch_id)
    await asyncio.sleep(0.01)
    monkeypatch.setattr(batch_store, "LEASE_MS", 5000)
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


async def test_a_released_window_is_begun_at_once(stores: Stores) -> None:
    batch_id = await stores.begun()
    first = await stores.claim(batch_id)
    await stores.batches.release(first)
    again = await stores.claim(batch_id)
    assert (again.index, again.was_begun) == (0, True)
    assert again.token != first.token


async def test_a_batch_that_fails_its_validation(stores: Stores) -> None:
    batch_id = await stores.add()
    window = await stores.claim(batch_id)
    assert await stores.batches.fail(window, [{"line": 1}], 3) == "failed"
    batch = await stores.batches.get(batch_id)
    assert batch is not None
    assert (batch.status, batch.errors) == ("failed", ({"line": 1},))
    assert await stores.uses() == 0
    assert await stores.batches.claim(batch_id) is None


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
    assert await batches.cancel(batch_id, OWNER) == ("cancelled", [])


async def test_a_batch_with_expired_lines_has_expired(stores: Stores) -> None:
    batch_id = await stores.begun()
    for expired in (0, 2):
        window = await stores.claim(batch_id)
        await stores.batches.end(window, WindowCounts(2, 2, expired), NO_PART, StoredPart("e", 1))
        await stores.batches.close(window)
    assert (await stores.batches.get(batch_id)).status == "expired"  # type: ignore[union-attr]


async def test_the_number_of_open_batches_of_an_owner_is_bounded(stores: Stores) -> None:
    ids = [await stores.add(most=2) for _ in range(3)]
    assert ids[2] == "full"
    await stores.batches.cancel(ids[0], OWNER)
    assert await stores.add(most=2) not in ("full", "unknown")


async def test_only_the_owner_of_a_file_makes_batches_of_it(stores: Stores) -> None:
    assert await stores.add(owner="another") == "unknown"
    stores.input = new_file_id()
    assert await stores.add() == "unknown"


async def test_a_batch_whose_record_was_lost_is_dropped(stores: Stores) -> None:
    batch_id = await stores.begun()
    await stores.batches.client.delete(stores.batches.keys.batch(batch_id))
    assert await stores.batches.claim(batch_id) is None
    assert await stores.batches.active() == []


def test_places_are_read_as_they_are_written() -> None:
    assert LinePlace.read(str(LinePlace(12, 3))) == LinePlace(12, 3)
    assert LinePlace.read("") == LinePlace(0, 1)
