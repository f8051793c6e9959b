"""A view of the engine agrees with `/debug/blocks` in every state, and reports each step once."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from quire.shared.protocol.views import (
    CACHED,
    MAX_NAME_LENGTH,
    NOBODY,
    PINNED,
    Member,
    Row,
    StepView,
    View,
    unpack_table,
)
from quire.worker.engine.engine import Engine
from quire.worker.inspect import engine_view
from quire.worker.inspect.block_report import read_blocks
from quire.worker.inspect.engine_view import make_view, name_of
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.inspect.step_log import StepLog
from quire.worker.pinned_prefixes import pin
from tests.worker.inspect.test_snapshot import add, make_engine


def read(engine: Engine, log: StepLog) -> View:
    return make_view(take_snapshot(engine), log.take(), "w1", 0)


def look(engine: Engine, log: StepLog | None = None) -> View:
    """Encode and decode the current view of the engine, and check that it agrees with the block map."""
    made = read(engine, log or StepLog(engine.groups))
    view, told = View.decode(made.encode()), read_blocks(engine).render()
    assert view == made
    usage = told["usage"]
    assert {name: usage[name] for name in view.figures} == view.figures
    assert (view.limits.block_size, view.limits.num_blocks) == (told["block_size"], told["num_blocks"])
    names = [f"{name_of(one['request'])}/{one['choice']}" for one in told["sequences"]]
    assert [f"{one.request}/{one.choice}" for one in view.sequences] == names
    assert [unpack_table(one.table) for one in view.sequences] == [one["blocks"] for one in told["sequences"]]
    assert [one.tokens for one in view.sequences] == [one["tokens"] for one in told["sequences"]]
    assert [one.state for one in view.sequences] == [one["state"] for one in told["sequences"]]
    owners = array("H")
    owners.frombytes(view.cells.owners)
    shown = [
        (
            block,
            filled,
            count,
            bool(flags & CACHED),
            bool(flags & PINNED),
            names[owner] if owner != NOBODY else None,
        )
        for block, owner, count, filled, flags in zip(
            unpack_table(view.cells.ids), owners, *view.cells[2:], strict=True
        )
    ]
    expected = [
        (
            one["id"],
            one["filled"],
            len(one["sequences"]),
            one["cached"],
            one["pinned"],
            next(iter(name_of(name[: name.rindex("/")]) + name[name.rindex("/") :] for name in one["sequences"]), None),
        )
        for one in told["blocks"]
    ]
    assert shown == expected
    return view


def test_a_view_agrees_with_the_block_map_whatever_runs() -> None:
    random = Random(5)
    engine = make_engine(num_blocks=40, num_host_blocks=16, max_num_batched_tokens=24)
    pin(engine, "house", tuple(range(50, 60)))
    number = 0
    seen = dict.fromkeys(("shared", "swapped", "pinned", "prefill"), 0)
    engine.observer = log = StepLog(engine.groups)
    for _ in range(400):
        if len(engine.requests) < 5 and random.random() < 0.3:
            number += 1
            prompt = tuple(random.choice(((50, 51, 52, 53), (1, 2, 3, 4)))) + tuple(
                range(60, 60 + random.randrange(20))
            )
            kind: dict[str, Any] = random.choice([{}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}])
            add(engine, f"{number:08x}aa", prompt, max_tokens=random.randrange(2, 30), **kind)
        engine.step()
        view = look(engine, log)
        seen["shared"] += view.figures["blocks_shared"] > 0
        seen["swapped"] += view.figures["sequences_swapped"] > 0
        seen["pinned"] += any(flags & PINNED for flags in view.cells.flags)
        seen["prefill"] += any(row.kind == "prefill" for step in view.steps for row in step.rows)
    assert min(seen.values()) > 0, seen


def test_what_steps_did_is_told_once() -> None:
    engine = make_engine()
    engine.observer = log = StepLog(engine.groups)
    add(engine, "0123456789", tuple(range(1, 11)), n=4, temperature=1.0)
    engine.step()
    engine.step()
    view = look(engine, log)
    assert view.members == tuple(Member("01234567", choice, 10) for choice in range(4))
    assert [[(row.member, row.kind, row.computed) for row in step.rows] for step in view.steps] == [
        [(0, "prefill", 10)],
        [(choice, "decode", 1) for choice in range(4)],
    ]
    tables = [unpack_table(one.table) for one in view.sequences]
    assert {move.target for move in view.steps[1].moves} < {table[2] for table in tables}
    again = look(engine, log)
    assert (again.members, again.steps) == ((), ())


def test_what_is_too_much_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_view, "MAX_CELLS", 1000)
    engine = make_engine(num_blocks=3000, max_num_seqs=304, max_num_batched_tokens=8000, max_model_len=256)
    engine.observer = log = StepLog(engine.groups)
    for number in range(38):
        add(engine, f"{number:04}", (number, *[7] * 199), n=8, temperature=1.0)
    engine.step()
    engine.step()
    view = View.decode(read(engine, log).encode())
    assert len(view.cells) == 1000
    assert view.hidden_cells == view.figures["blocks_used"] + view.figures["blocks_cached"] - 1000
    assert view.figures["blocks_used"] == 38 * (50 + 8)
    assert (len(view.sequences), view.hidden_sequences) == (256, 48)
    assert {(len(unpack_table(one.table)), one.num_blocks) for one in view.sequences} == {(32, 51)}
    engine.step()
    view = View.decode(read(engine, log).encode())
    assert [len(step.rows) for step in view.steps] == [256]


def test_neither_prompts_nor_tokens_are_in_a_view() -> None:
    engine = make_engine(max_model_len=128)
    engine.observer = log = StepLog(engine.groups)
    add(engine, "r", (81, 82, 83), max_tokens=5)
    engine.step()
    view = read(engine, log)
    assert [field for one in view.sequences for field in one] == ["r", 0, "running", 1, 3, 4, 3, 1, 0, b"\0\0\0\0"]
    assert view.members == (Member("r", 0, 3),)
    assert view.steps == (StepView((Row(0, "prefill", 3, 3, 3, 0, 0, b"\0\0\0\0"),)),)


def test_the_requests_of_one_call_have_different_names() -> None:
    call = "0123456789abcdef" * 2
    assert [name_of(one) for one in (call, f"{call}-1", f"{call}-999")] == ["01234567", "01234567-1", "01234567-999"]
    assert len(name_of(f"{call}-2047")) <= MAX_NAME_LENGTH
