"""The invariants of an engine's bookkeeping: each defect is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.worker.engine.engine import Engine
from quire.worker.engine.integrity import check_groups
from tests.support.mock_model import make_engine, request, steps


@pytest.fixture
def engine() -> Engine:
    """Two running groups, one of them forked, and a waiting one."""
    made = make_engine(max_num_seqs=3)
    made.add(request("one", (1, 2, 3, 4, 5), ignore_eos=True))
    made.add(request("two", (6, 7, 8), n=2, ignore_eos=True))
    made.add(request("waits", (9,), n=2))
    steps(made, 2)
    check_groups(made.groups)
    return made


def loses_a_row(engine: Engine) -> None:
    engine.groups.running[0].sequences.pop().block_table.clear()
    engine.groups.blocks.check_integrity = lambda sequences: None  # type: ignore[method-assign]


def counts_a_reserved_row_too_many(engine: Engine) -> None:
    engine.input_batch.num_reserved += 1


def is_in_two_places(engine: Engine) -> None:
    engine.groups.swapped.append(engine.groups.running[0])


def forgets_the_order(engine: Engine) -> None:
    engine.groups.running.reverse()


def keeps_blocks_of_a_waiting_group(engine: Engine) -> None:
    group = engine.groups.running.pop()
    engine.groups.waiting[1].append(group)


def holds_an_empty_block(engine: Engine) -> None:
    sequence = engine.groups.running[0].sequences[0]
    engine.groups.blocks.append(sequence)
    engine.input_batch.add_block(sequence)


def has_another_table_in_its_row(engine: Engine) -> None:
    engine.input_batch.block_tables[engine.groups.running[0].sequences[0].row, 0] += 1


def has_another_length_in_its_row(engine: Engine) -> None:
    engine.input_batch.lengths[engine.groups.running[0].sequences[0].row] += 1


def has_another_last_token_in_its_row(engine: Engine) -> None:
    engine.input_batch.last_tokens[engine.groups.running[0].sequences[0].row] += 1


def would_write_to_a_shared_block(engine: Engine) -> None:
    group = engine.groups.running[0]
    [parent] = group.sequences
    child = parent.copy(1)
    engine.groups.blocks.fork(parent, child, parent.num_computed)
    group.sequences.append(child)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (loses_a_row, "rows leak"),
        (counts_a_reserved_row_too_many, "reserved rows leak"),
        (is_in_two_places, "two places"),
        (forgets_the_order, "not in order"),
        (keeps_blocks_of_a_waiting_group, "blocks leak"),
        (holds_an_empty_block, "holds an empty block"),
        (has_another_table_in_its_row, "another table"),
        (has_another_length_in_its_row, "another length"),
        (has_another_last_token_in_its_row, "another token"),
        (would_write_to_a_shared_block, "would write to a shared block"),
    ],
)
def test_a_defect_is_found(engine: Engine, defect: Callable[[Engine], None], message: str) -> None:
    defect(engine)
    with pytest.raises(AssertionError, match=message):
        check_groups(engine.groups)


def test_an_engine_that_forgets_a_request_is_found_out(engine: Engine) -> None:
    engine.check_integrity()
    del engine.requests["waits"]
    with pytest.raises(AssertionError, match="disagree"):
        engine.check_integrity()
