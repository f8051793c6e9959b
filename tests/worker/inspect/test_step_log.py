"""The log of steps: what it tells is what the engine did, step by step, within bounds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.protocol.views import MAX_MOVES, MAX_STEPS, Move, Row, unpack_table
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.drafts import Drafts
from quire.worker.engine.step import Step
from quire.worker.inspect import step_log
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.inspect.step_log import RecentSteps, StepLog
from tests.support.mock_model import continuation
from tests.worker.inspect.test_snapshot import SIZE, add, make_engine


def watched(**limits: Any) -> tuple[Engine, StepLog]:
    engine = make_engine(**limits)
    engine.observer = log = StepLog(engine.groups)
    return engine, log


def read(recent: RecentSteps) -> list[dict[str, tuple[str, int, list[int]]]]:
    """Return the kind, the filled slots and the table of each sequence, step by step, as a viewer finds them."""
    members, steps, _ = recent.render()
    names = [f"{member.group.request_id}/{member.choice}" for member in members]
    tables: dict[str, list[int]] = {}
    found = []
    for step in steps:
        state = {}
        for row in step.rows:
            name = names[row.member]
            tables[name] = tables.get(name, [])[: row.start] + unpack_table(row.table)
            has_blocks = row.kind not in ("waiting", "swapped")
            state[name] = (row.kind, row.filled, tables[name] if has_blocks else [])
        found.append(state)
    return found


def test_steps_told_together_are_those_that_the_engine_made_one_by_one() -> None:
    """One log is read after every step, another one after twelve; sequences share, copy, swap, wait and return."""
    random = Random(3)
    engine, each = watched(num_blocks=40, num_host_blocks=16, max_num_batched_tokens=24)
    together = StepLog(engine.groups)
    true: list[dict[str, list[int]]] = []

    def observe(step: Step) -> None:
        each(step)
        together(step)
        running = [sequence for group in engine.groups.running for sequence in group.unfinished]
        true.append({f"{one.group.request_id}/{one.choice}": one.block_table.copy() for one in running})

    engine.observer = observe
    number, seen, copies = 0, set(), 0
    expected: list[dict[str, Any]] = []
    for turn in range(480):
        if len(engine.requests) < 5 and random.random() < 0.3:
            number += 1
            kind: dict[str, Any] = random.choice([{}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}])
            add(
                engine,
                f"{number:04}",
                tuple(range(50, 52 + random.randrange(20))),
                max_tokens=random.randrange(2, 30),
                **kind,
            )
        engine.step()
        told = read(each.take())
        expected += told
        for name, (kind, filled, table) in (told[-1] if told else {}).items():
            seen.add(kind)
            assert table == true[-1].get(name, []), name
            assert len(table) * SIZE >= filled or kind in ("waiting", "swapped"), name
        held = {f"{one.request_id}/{one.choice}": one for one in take_snapshot(engine).sequences}
        # Beams are pruned and fork at the end of a step; every other sequence ends a step as the log tells it.
        for name, (kind, filled, table) in (told[-1] if told else {}).items():
            group = engine.requests.get(name.partition("/")[0])
            if group is not None and group.beams is None and name in held and kind in ("decode", "prefill"):
                assert (held[name].num_filled, held[name].block_table) == (filled, table)
        if turn % 12 == 11:
            recent = together.take()
            copies += sum(move.kind == "copy" for step in recent.render()[1] for move in step.moves)
            assert read(recent) == expected
            expected = []
    assert seen >= {"decode", "prefill", "waiting", "swapped"}
    assert copies > 0


def test_moves_belong_to_their_steps() -> None:
    engine, log = watched()
    add(engine, "a", tuple(range(1, 11)), n=4, temperature=1.0)
    engine.step()
    engine.step()
    _, steps, _ = log.take().render()
    assert [len(step.moves) for step in steps] == [0, 3], "all but one write into a copy of the last block"
    assert len({move.source for move in steps[1].moves}) == 1
    assert [[row.kind for row in step.rows] for step in steps] == [["prefill"], ["decode"] * 4]
    assert log.take() == RecentSteps()


def test_a_row_tells_how_many_tokens_were_drafted_and_accepted() -> None:
    engine, log = watched(max_num_batched_tokens=64)
    engine.drafts = Drafts(engine.groups, None)
    answer = continuation((1, 2, 3), 20, ignore_eos=True)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prediction = (*answer[:4], answer[4] + 1, answer[5])
    engine.add(GenerationRequest("a", "mock", (1, 2, 3), params, prediction=prediction))
    engine.step()
    engine.step()
    [[prompt], [decode]] = [step.rows for step in log.take().render()[1]]
    assert prompt._replace(table=b"") == Row(0, "prefill", 3, 3, 3)
    assert decode._replace(start=0, table=b"") == Row(0, "decode", 7, 7, 1 + 5, 3)


def test_only_the_latest_steps_are_kept_and_the_others_are_counted() -> None:
    engine, log = watched(num_blocks=400, max_model_len=1024)
    add(engine, "a", (1, 2, 3), max_tokens=MAX_STEPS + 20)
    while engine.has_work:
        engine.step()
    _, steps, hidden = log.take().render()
    assert (len(steps), hidden) == (MAX_STEPS, 20)
    assert steps[-1].rows[0].filled == 3 + MAX_STEPS + 20 - 1


def test_too_much_is_left_out_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MAX_ROWS", 10)
    engine, log = watched()
    for name in "abc":
        add(engine, name, (1, 2, 3), max_tokens=6)
    while engine.has_work:
        engine.step()
    _, steps, hidden = log.take().render()
    assert [len(step.rows) for step in steps] == [3, 3, 3]
    assert hidden == 3
    assert [(row.start, len(row.table)) for row in steps[0].rows] == [(0, 8)] * 3, (
        "whole tables: nobody knows the others"
    )


def test_moves_beyond_the_limit_are_left_out() -> None:
    engine, log = watched()
    add(engine, "a", (1, 2, 3))
    step = engine.scheduler.schedule()
    step.copies = [(block, block + 1) for block in range(MAX_MOVES + 3)]
    log(step)
    [found] = log.take().render()[1]
    assert len(found.moves) == MAX_MOVES
    assert found.moves[-1] == Move("copy", MAX_MOVES - 1, MAX_MOVES)


def test_of_steps_with_many_sequences_the_latest_one_is_told() -> None:
    engine, log = watched(num_blocks=200, max_num_seqs=32, max_num_batched_tokens=256)
    for number in range(20):
        add(engine, f"{number}", (1, 2, 3), max_tokens=5)
    for _ in range(4):
        engine.step()
    _, steps, hidden = log.take().render()
    assert [len(step.rows) for step in steps] == [20]
    assert hidden == 3
