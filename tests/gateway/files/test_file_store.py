"""The records of files: bounds, owners, pages and deletions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.gateway.files.file_store import (
    FileStore,
    StorageBounds,
    StorageFull,
    StoredFile,
    UploadLost,
    new_file_id,
    read_id,
)
from quire.gateway.files.folder_storage import FolderStorage
from quire.gateway.files.storage import StorageError
from quire.shared.keys import BATCHES_TAG
from quire.shared.redis.clients import command_client
from tests.support.gateway.storage_contract import put


@pytest.fixture
async def store(redis_url: str, tmp_path: Path) -> AsyncIterator[FileStore]:
    client = command_client(redis_url, BATCHES_TAG, connections=2)
    yield FileStore(client, FolderStorage(tmp_path), StorageBounds(file=100, owner=150, all=250))
    await client.aclose()


async def add(store: FileStore, size: int = 10, owner: str = "o", file_id: str = "") -> StoredFile:
    file_id = file_id or new_file_id()
    await store.reserve(file_id, owner, size)
    await put(store.storage, "0", b"x" * size, file_id=file_id)
    return await store.complete(file_id, owner, size, 0, filename="a.jsonl", purpose="batch")


async def used(store: FileStore) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = await store.client.hgetall(store.keys.used)
    return found


async def test_a_file_is_found_by_its_owner_alone(store: FileStore) -> None:
    file = await add(store)
    assert await store.get(file.id, "o") == file
    assert await store.get(file.id, "") is None
    assert await store.delete(file.id, "") == "unknown"
    assert await store.parts(file.id) == [("0", 10)]
    assert file.shown()["id"] == f"file-{file.id}"
    assert await store.delete(file.id, "o") == "deleted"
    assert await store.get(file.id, "o") is None
    assert await used(store) == {b"all": b"0"}
    with pytest.raises(StorageError):
        [piece async for piece in store.storage.read(file.id, "0")]


async def test_uploads_reserve_what_they_may_take(store: FileStore) -> None:
    first, second = new_file_id(), new_file_id()
    await store.reserve(first, "o", 100)
    with pytest.raises(StorageFull) as caught:
        await store.reserve(second, "o", 100)
    assert (caught.value.whose, caught.value.taken) == ("owner", 100)
    assert await store.get(first, "o") is None  # it is not complete
    await add(store, 30, file_id=first)
    await store.reserve(second, "o", 100)  # the first one was smaller than it might have been
    assert await used(store) == {b"all": b"130", b"owner:o": b"130"}
    await store.reserve(new_file_id(), "p", 100)
    with pytest.raises(StorageFull) as caught:
        await store.reserve(new_file_id(), "p", 50)
    assert caught.value.whose == "all"
    assert await store.delete(second, "o") == "deleted"
    assert await used(store) == {b"all": b"130", b"owner:o": b"30", b"owner:p": b"100"}


async def test_a_repeated_command_counts_once(store: FileStore) -> None:
    file_id = new_file_id()
    for _ in range(2):
        await store.reserve(file_id, "o", 100)
    for _ in range(2):
        await add(store, 40, file_id=file_id)
    assert await used(store) == {b"all": b"40", b"owner:o": b"40"}


async def test_an_announced_size_must_be_free_and_is_not_reserved(store: FileStore) -> None:
    await store.reserve(new_file_id(), "o", 10, announced=150)
    assert await used(store) == {b"all": b"10", b"owner:o": b"10"}
    with pytest.raises(StorageFull):
        await store.reserve(new_file_id(), "o", 10, announced=150)


@pytest.mark.parametrize("life_s", [0, 5000])
async def test_a_renewal_that_comes_after_the_end_of_an_upload_changes_nothing(store: FileStore, life_s: int) -> None:
    file_id = new_file_id()
    await store.reserve(file_id, "o", 10)
    file = await store.complete(file_id, "o", 10, life_s, filename="a", purpose="batch")
    expires = await store.client.zscore(store.keys.expiring, file_id)
    for size in (10, 1000):  # the second is over all bounds
        await store.reserve(file_id, "o", size, has_begun=True)
    assert await store.get(file_id, "o") == file
    assert await store.client.zscore(store.keys.expiring, file_id) == expires == (file.expires or None)
    assert await used(store) == {b"all": b"10", b"owner:o": b"10"}


async def test_an_upload_that_was_given_up_does_not_come_back(store: FileStore) -> None:
    file_id = new_file_id()
    await store.reserve(file_id, "o", 10)
    await store.client.hset(store.keys.file(file_id), "expires", 1)  # the lease has ended
    assert await store.delete(file_id, "o", only_expired=True) == "deleted"
    with pytest.raises(UploadLost):
        await store.reserve(file_id, "o", 10, has_begun=True)
    with pytest.raises(UploadLost):
        await store.complete(file_id, "o", 10, 0, filename="a", purpose="batch")
    assert await used(store) == {b"all": b"0"}
    assert not await store.client.exists(store.keys.file(file_id), store.keys.expiring, store.keys.files("o"))


async def test_pages(store: FileStore) -> None:
    ids = [(await add(store, 1)).id for _ in range(5)]
    page = await store.page("o", 2, "", oldest_first=True)
    assert page is not None
    assert (list(page.ids), page.has_more) == (ids[:2], True)
    page = await store.page("o", 3, ids[1], oldest_first=True)
    assert page is not None
    assert (list(page.ids), page.has_more) == (ids[2:], False)
    page = await store.page("o", 2, ids[2], oldest_first=False)
    assert page is not None
    assert (list(page.ids), page.has_more) == ([ids[1], ids[0]], False)
    assert await store.page("another", 2, ids[0], oldest_first=False) is None


@pytest.mark.parametrize(
    "public_id", ["", "file-", "file-x", "file-" + "A" * 32, "batch_" + "0" * 32, "file-" + "0" * 33]
)
def test_ids_of_another_form_are_none(public_id: str) -> None:
    assert read_id(public_id, "file-") == ""
