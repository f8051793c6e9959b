"""A cursor takes every token once and in order, and cuts items without losing a token."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.stream.buffer import MAX_TAKEN
from quire.gateway.stream.cursor import Cursor, cut, split
from quire.shared.messages import Delta, Outcome, StepItem
from tests.support.hand_worker import IDS, one_each

# The size of the log-probability record of a token with 20 alternatives.
SCORED = bytes(4 + 8 * 20)


@given(st.lists(st.integers(0, len(IDS) - 1), max_size=60), st.data())
def test_a_cursor_takes_every_token_once_and_in_order(order: list[int], data: st.DataObject) -> None:
    """Items arrive in any order. With reads of the log where the cursor asks for them, the output is complete."""
    log = one_each("r")
    cursor = Cursor("r", 0.0)
    taken: list[int] = []

    def take(item: StepItem) -> None:
        new = cursor.take(item)
        if new is not None:
            taken.extend(token for delta in new.deltas for token in delta.token_ids)

    for index in order:
        take(log[index])
        if cursor.behind and data.draw(st.booleans()):
            cursor.behind = False
            for item in log[cursor.next : index + 1]:
                take(item)
    for item in log[cursor.next :]:
        take(item)
    assert taken == IDS
    assert cursor.ended


@given(st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True), st.integers(0, 12))
def test_items_that_overlap_are_cut(bounds: list[int], have: int) -> None:
    """After Redis lost the end of a log, a worker sends the tokens again, in other portions."""
    start, end = sorted(bounds)
    item = StepItem("r", start, (Delta(0, tuple(range(start, end)), "length"),), Outcome("length"))
    cursor = Cursor("r", 0.0)
    cursor.next = have
    new = cursor.take(item)
    if start > have:
        assert new is None
        assert cursor.behind
    else:
        assert new is not None
        assert [token for delta in new.deltas for token in delta.token_ids] == list(range(have, end))
        assert new.deltas[-1].finish_reason == "length"
        assert cursor.next == max(have, end)


def test_a_cut_goes_through_the_choices_in_order() -> None:
    cursor = Cursor("r", 0.0)
    cursor.next = 3
    new = cursor.take(StepItem("r", 0, (Delta(0, (1, 2)), Delta(1, (3, 4)), Delta(2, (5,), "stop"))))
    assert new is not None
    assert (new.start, new.deltas) == (3, (Delta(1, (4,)), Delta(2, (5,), "stop")))


def test_a_long_item_costs_each_of_its_parts_the_same() -> None:
    """The bytes copied for all parts together grow linearly with the item's size."""
    copied = []

    class Records(bytes):
        def __getitem__(self, key: Any) -> Any:
            found = Records(super().__getitem__(key))
            copied.append(len(found))
            return found

    count = 10_000
    rest = [StepItem("r", 0, (Delta(0, tuple(range(count)), "length", logprobs=Records(SCORED * count)),), None)]
    parts = []
    while rest:
        some, rest = cut(rest, MAX_TAKEN)
        parts += some
    assert sum(copied) < 20 * len(SCORED) * count
    assert [token for part in parts for token in part.deltas[0].token_ids] == list(range(count))
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]


def test_an_item_is_cut_in_two_only_inside() -> None:
    item = StepItem("r", 3, (Delta(0, (1, 2)), Delta(1, (3,), "stop")), Outcome("stop"))
    for at in (0, 3, 6, 9):
        assert split(item, at) == (item,)
    for at in (4, 5):
        first, second = split(item, at)
        assert (first.start, first.end, second.start, second.end) == (3, at, at, 6)
        assert (first.outcome, second.outcome) == (None, item.outcome)
        assert all(delta.finish_reason is None for delta in first.deltas)
        assert second.deltas[-1].finish_reason == "stop"
