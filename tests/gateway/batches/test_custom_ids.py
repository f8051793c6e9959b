"""Duplicates are found among many ids, in little memory."""

from __future__ import annotations

from quire.gateway.batches.custom_ids import CustomIds


def test_every_duplicate_is_found_and_no_other_id() -> None:
    ids = CustomIds()
    assert all(ids.add(f"line-{number}") for number in range(20_000))
    assert not any(ids.add(f"line-{number}") for number in range(0, 20_000, 7))
    assert ids.add("another")
    assert not ids.add("another")


def test_an_id_takes_a_few_bytes() -> None:
    ids = CustomIds()
    for number in range(20_000):
        ids.add(str(number))
    assert ids._slots.itemsize * len(ids._slots) <= 32 * 20_000


def test_two_tables_have_different_hashes() -> None:
    """A client cannot know which ids meet."""
    tables = [CustomIds(), CustomIds()]
    for table in tables:
        table.add("x")
    assert set(tables[0]._slots) != set(tables[1]._slots)
