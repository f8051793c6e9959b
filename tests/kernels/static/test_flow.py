"""Control flow: blocks, what a branch decides, loops, and walks over all ways."""

from __future__ import annotations

import pytest

from tests.kernels.static.flow import MAX_STATES, NEXT, Flow, Jump

# 0 if: -> 2 | 1 | 2 loop: | 3 -> 2 | 4 end
JUMPS = [Jump(2, True), NEXT, NEXT, Jump(2, True), Jump(None, False)]
FLOW = Flow.of(JUMPS, [2])


def test_blocks_end_at_jumps_and_begin_at_labels() -> None:
    assert FLOW.blocks == [range(1), range(1, 2), range(2, 4), range(4, 5)]
    assert FLOW.successors == [[2, 1], [2], [2, 3], []]


def test_a_branch_decides_what_one_way_passes_and_another_does_not() -> None:
    assert FLOW.decides[0] == {1}
    assert FLOW.decides[2] == {2}, "a loop decides how often it runs"
    assert FLOW.decides[1] == FLOW.decides[3] == set()


def test_a_branch_decides_what_a_branch_under_it_decides() -> None:
    # 0 -> 4 | 1 -> 3 | 2 | 3 | 4
    flow = Flow.of([Jump(4, True), Jump(3, True), NEXT, NEXT, Jump(None, False)], [3, 4])
    assert flow.decides[0] >= {1, 2, 3}
    assert flow.decides[1] == {2}


def test_only_innermost_loops_are_loops() -> None:
    assert FLOW.loops == [range(2, 4)]
    nested = Flow.of([NEXT, Jump(1, True), Jump(0, True), Jump(None, False)], [0, 1])
    assert nested.loops == [range(1, 2)]


def test_a_walk_passes_every_way() -> None:
    found = set()

    def step(state: tuple[int, ...], index: int) -> tuple[int, ...]:
        if index == 4:
            found.add(state)
        return state if index in state else (*state, index)

    FLOW.walk((), step)
    assert found == {(0, 1, 2, 3), (0, 2, 3)}


def test_a_walk_whose_states_grow_is_ended() -> None:
    with pytest.raises(AssertionError, match="do not repeat"):
        FLOW.walk(0, lambda state, index: state + 1)
    assert MAX_STATES < 10_000
