"""The block report agrees with the tables of the sequences, counted here block by block."""

from __future__ import annotations

import json

from quire.worker.engine.engine import Engine
from quire.worker.inspect.block_report import read_blocks
from tests.worker.inspect.test_snapshot import SIZE, add, make_engine


def expected_blocks(engine: Engine) -> dict[int, tuple[list[str], int]]:
    """Owners and filled slots of each block that is not free, from the bookkeeping of the engine."""
    blocks = engine.scheduler.blocks
    found: dict[int, tuple[list[str], int]] = {block: ([], SIZE) for block in blocks.known_blocks()}
    held = [
        (f"{group.request_id}/{one.choice}", one.block_table, max(one.num_computed, one.num_stored))
        for group in engine.groups.all_groups()
        for one in group.unfinished
    ]
    held += [("", prefix.blocks, prefix.num_tokens) for prefix in blocks.pinned]
    for block in {block for _, table, _ in held for block in table}:
        owners = [name for name, table, _ in held if block in table and name]
        slots = [tokens - SIZE * table.index(block) for _, table, tokens in held if block in table]
        found[block] = owners, max(0, min(SIZE, max(slots)))
    return found


def test_each_block_has_its_owners_and_slots_whatever_runs() -> None:
    engine = make_engine(24, 24, preemption="swap")
    engine.pin("p", (7, 7, 7, 7, 7, 7))
    for i in range(4):
        add(engine, f"n{i}", (7, 7, 7, 7, 7, 7, i + 1), n=2, temperature=1.0, max_tokens=16)
    add(engine, "beam", (5, 4, 3), beam_width=3, max_tokens=12)
    num_shared = 0
    while engine.has_work:
        engine.step()
        report = json.loads(json.dumps(read_blocks(engine).render()))
        shown = {one["id"]: (one["sequences"], one["filled"]) for one in report["blocks"]}
        assert shown == expected_blocks(engine)
        ref_counts = engine.scheduler.blocks.ref_counts
        assert [one["refs"] for one in report["blocks"]] == [ref_counts[one["id"]] for one in report["blocks"]]
        num_shared += sum(one["shared"] for one in report["blocks"])
    assert num_shared > 0
    assert [one["id"] for one in report["blocks"] if one["pinned"]] == engine.scheduler.blocks.pinned[0].blocks


def test_a_waiting_sequence_has_no_blocks_yet() -> None:
    engine = make_engine(max_num_seqs=1)
    add(engine, "first", (1, 2, 3))
    add(engine, "second", (4, 5, 6))
    engine.step()
    states = {one["request"]: (one["state"], len(one["blocks"])) for one in read_blocks(engine).render()["sequences"]}
    assert states == {"first": ("running", 1), "second": ("waiting", 0)}
