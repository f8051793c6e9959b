"""Views come back as they were sent; nothing else is taken for one."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.views import (
    FIGURES,
    KINDS,
    MAX_BYTES,
    MAX_CELLS,
    MAX_MEMBERS,
    MAX_MOVES,
    MAX_ROWS,
    MAX_SEQUENCES,
    MAX_STEP_ENTRIES,
    MAX_STEPS,
    MAX_TABLE_ENTRIES,
    MOVES,
    NOBODY,
    STATES,
    Cells,
    Member,
    Move,
    Row,
    SequenceView,
    StepView,
    View,
    ViewLimits,
    unpack_table,
)

LIMITS = ViewLimits(16, 64, 8, 1024, 8, 256)
VIEW = View(
    worker="w1",
    number=7,
    limits=LIMITS,
    figures={name: index for index, name in enumerate(FIGURES)},
    cells=Cells(
        array("I", [2, 3, 9]).tobytes(), array("H", [0, 1, NOBODY]).tobytes(), b"\2\1\0", b"\x10\5\x10", b"\1\0\3"
    ),
    hidden_cells=0,
    sequences=(
        SequenceView("0a1b2c3d", 0, "running", 1, 20, 22, 21, 2, 0, array("I", [2, 3]).tobytes()),
        SequenceView("0a1b2c3d", 1, "waiting", 1, 20, 20, 0, 0, 0, b""),
    ),
    hidden_sequences=0,
    members=(Member("0a1b2c3d", 0, 20), Member("0a1b2c3d", 1, 20), Member("0a1b2c3e", 0, 4)),
    steps=(
        StepView(
            (
                Row(0, "decode", 22, 22, 1, 0, 0, array("I", [2, 3]).tobytes()),
                Row(1, "prefill", 20, 12, 12, 0, 0, array("I", [9]).tobytes()),
                Row(2, "decode", 16, 16, 6, 3, 0, array("I", [4]).tobytes()),
            ),
            (Move("copy", 2, 3),),
        ),
        StepView((Row(0, "decode", 23, 23, 1, 0, 1, array("I", [5, 6]).tobytes()), Row(1, "swapped", 20, 12))),
    ),
)


def packed(index: int, value: Any) -> bytes:
    """VIEW as bytes, with another value at a place."""
    fields = msgpack.unpackb(VIEW.encode())
    fields[index] = value
    return msgpack.packb(fields)  # type: ignore[no-any-return]


def test_a_view_comes_back_as_it_was_sent() -> None:
    assert View.decode(VIEW.encode()) == VIEW
    assert unpack_table(VIEW.sequences[0].table) == [2, 3]
    empty = replace(VIEW, cells=Cells(), sequences=(), members=(), steps=())
    assert View.decode(empty.encode()) == empty


def test_the_largest_view_is_within_its_bounds() -> None:
    limits = LIMITS._replace(num_blocks=2**31, block_size=255)
    ids = array("I", range(2**31 - MAX_CELLS, 2**31)).tobytes()
    cells = Cells(ids, b"\0\0" * MAX_CELLS, b"\xff" * MAX_CELLS, b"\xff" * MAX_CELLS, b"\3" * MAX_CELLS)
    table = b"\xff\xff\xff\x7f" * (MAX_TABLE_ENTRIES // MAX_SEQUENCES)
    entries = b"\xff\xff\xff\x7f" * (MAX_STEP_ENTRIES // MAX_ROWS)
    huge = View(
        "w" * 256,
        2**62,
        limits,
        dict.fromkeys(FIGURES, 2**62),
        cells,
        2**31,
        (SequenceView("x" * 12, 127, "running", 2, 2_000_000, 4_000_000, 4_000_000, 2**31, 2**31, table),)
        * MAX_SEQUENCES,
        2**31,
        (Member("x" * 12, 127, 2_000_000),) * MAX_MEMBERS,
        (
            StepView(
                (Row(255, "prefill", 4_000_000, 4_000_000, 4_000_000, 0, 2**31, entries),) * (MAX_ROWS // MAX_STEPS),
                (Move("swap_out", 2**31, 2**31),) * (MAX_MOVES // MAX_STEPS),
            ),
        )
        * MAX_STEPS,
        2**62,
    )
    data = huge.encode()
    assert len(data) < MAX_BYTES
    assert View.decode(data) == huge


SEQUENCE = [*VIEW.sequences[0]]


def row(**changes: Any) -> bytes:
    """VIEW as bytes, with a single step of one row."""
    return packed(10, [[[[*VIEW.steps[0].rows[2]._replace(**changes)]], []]])


WRONG = {
    "a version of the past": packed(0, 2),
    "a version of the future": packed(0, 4),
    "true for a version": packed(0, True),
    "a worker that is no text": packed(1, 5),
    "a long worker": packed(1, "w" * 257),
    "a negative number": packed(2, -1),
    "a limit too few": packed(3, [16, 64]),
    "blocks of no size": packed(3, [0, 64, 8, 1024, 8, 256]),
    "a figure too few": packed(4, [1] * (len(FIGURES) - 1)),
    "a figure that is a float": packed(4, [1.5] * len(FIGURES)),
    "cells that are no columns": packed(5, [[1], [1], [1], [1], [1]]),
    "columns of different lengths": packed(5, [b"\0\0\0\0", b"\0\0", b"\1", b"\1\1", b"\0"]),
    "too many cells": packed(5, [bytes(n * (MAX_CELLS + 1)) for n in (4, 2, 1, 1, 1)]),
    "a block that is not there": packed(5, [b"\x40\0\0\0", b"\0\0", b"\1", b"\1", b"\0"]),
    "blocks out of order": packed(5, [array("I", [3, 2]).tobytes(), b"\0\0\0\0", b"\1\1", b"\1\1", b"\0\0"]),
    "an owner that is not there": packed(5, [b"\0\0\0\0", b"\2\0", b"\1", b"\1", b"\0"]),
    "more filled than a block has": packed(5, [b"\0\0\0\0", b"\0\0", b"\1", b"\x11", b"\0"]),
    "unknown flags": packed(5, [b"\0\0\0\0", b"\0\0", b"\1", b"\1", b"\4"]),
    "too many sequences": packed(7, [SEQUENCE] * (MAX_SEQUENCES + 1)),
    "a state that is none": packed(7, [[*SEQUENCE[:2], "asleep", *SEQUENCE[3:]]]),
    "a class that is none": packed(7, [[*SEQUENCE[:3], 3, *SEQUENCE[4:]]]),
    "text where an id is cut short": packed(7, [["a prompt that travels", *SEQUENCE[1:]]]),
    "a table with half an entry": packed(7, [[*SEQUENCE[:9], b"\0\0"]]),
    "a table longer than its blocks": packed(7, [[*SEQUENCE[:7], 1, 0, SEQUENCE[9]]]),
    "too many entries in tables": packed(7, [[*SEQUENCE[:7], 9000, 0, bytes(4 * 8000)]] * 2),
    "too many members": packed(9, [["x", 0, 1]] * (MAX_MEMBERS + 1)),
    "a member whose name is cut short": packed(9, [["a prompt that travels", 0, 1]]),
    "too many steps": packed(10, [[[], []]] * (MAX_STEPS + 1)),
    "too many rows": packed(10, [[[[0, "decode", 1, 1, 1, 0, 0, b""]] * (MAX_ROWS // 2 + 1), []]] * 2),
    "too many moves": packed(10, [[[], [["copy", 1, 2]] * (MAX_MOVES // 2 + 1)]] * 2),
    "too many entries in the tables of rows": packed(
        10, [[[[0, "decode", 1, 1, 1, 0, 0, bytes(4 * (MAX_STEP_ENTRIES // 2 + 1))]] * 2, []]]
    ),
    "a row of nobody": row(member=3),
    "a kind of row that is none": row(kind="asleep"),
    "a row whose table begins before its beginning": row(start=-1),
    "a row whose table has half an entry": row(table=b"\0\0"),
    "more accepted than drafted": row(accepted=6),
    "an accepted token of a decode without draft": row(computed=0, accepted=1),
    "an accepted token of a prompt": row(kind="prefill", accepted=1),
    "fewer than no accepted tokens": row(accepted=-1),
    "accepted by half": row(accepted=1.0),
    "a step of one field": packed(10, [[[]]]),
    "a move that is none": packed(10, [[[], [["stolen", 1, 2]]]]),
    "an extension type": packed(11, msgpack.ExtType(1, b"")),
    "a field too many": msgpack.packb([*msgpack.unpackb(VIEW.encode()), 1]),
    "two views": VIEW.encode() * 2,
    "a beginning": VIEW.encode()[:-1],
    "nothing": b"",
    "too much": b"\xc4" * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_view_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        View.decode(data)


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        View.decode(data)


@given(st.integers(0, len(VIEW.encode()) - 1), st.binary(min_size=1, max_size=4))
def test_a_damaged_view_is_refused_or_is_one_that_could_be_sent(at: int, noise: bytes) -> None:
    data = bytearray(VIEW.encode())
    data[at : at + len(noise)] = noise
    try:
        found = View.decode(bytes(data))
    except MessageError:
        return
    assert View.decode(found.encode()) == found
    assert {one.state for one in found.sequences} <= set(STATES)
    assert {move.kind for one in found.steps for move in one.moves} <= set(MOVES)
    assert {row.kind for one in found.steps for row in one.rows} <= set(KINDS)
