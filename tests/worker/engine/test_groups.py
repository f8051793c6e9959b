"""Groups of sequences, and beams."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.blocks import Copy
from quire.worker.engine.features.beams import BeamSearch
from quire.worker.engine.groups import DEFAULT_PRIORITY, NUM_PRIORITIES, Groups
from quire.worker.engine.integrity import check_groups
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import GroupState, SequenceGroup
from quire.worker.engine.step import DecodeBatch, Step
from tests.support.mock_model import make_engine, request, run
from tests.worker.engine.test_scheduler import swapped_engine

SIZE = 4


def make_groups(preemption: str = "auto", num_host_blocks: int = 8) -> Groups:
    return Groups(
        EngineLimits(
            num_blocks=32,
            block_size=SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_model_len=64,
            num_host_blocks=num_host_blocks,
            preemption=preemption,
        )
    )


def running(groups: Groups, tokens: int = 6, n: int = 1, arrival: int = 0, priority: int = 1) -> SequenceGroup:
    """Add and run a group whose sequences have computed the prompt and begun to decode."""
    prompt = tuple(range(1, tokens + 1))
    group = SequenceGroup(f"r{arrival}", prompt, SamplingParams(8, n=n, ignore_eos=True), arrival, priority)
    group.start()
    groups.add(group)
    groups.waiting[priority].remove(group)
    leader = group.sequences[0]
    groups.blocks.start(leader, groups.blocks.find_prefix(leader, 0), tokens)
    groups.run(group, [leader])
    leader.num_computed = tokens
    if n > 1:
        groups.fork(group)
    for sequence in group.sequences:
        sequence.token_ids.append(50 + sequence.choice)
        groups.input_batch.lengths[sequence.row] += 1
        groups.input_batch.last_tokens[sequence.row] = sequence.token_ids[-1]
        groups.begin_decoding(sequence)
    groups.refresh()
    return group


def test_priorities_are_the_classes_of_the_queue() -> None:
    assert len(PRIORITY_CLASSES) == NUM_PRIORITIES
    assert PRIORITY_CLASSES[DEFAULT_PRIORITY] == "standard"


def test_a_group_moves_from_waiting_to_running_and_out() -> None:
    groups = make_groups()
    group = SequenceGroup("r", (1, 2), SamplingParams(4), priority=2)
    group.start()
    groups.add(group)
    assert (group.state, list(groups.all_waiting()), groups.num_waiting) == (GroupState.WAITING, [group], 1)
    groups.remove(group)
    assert (group.state, groups.all_groups()) == (GroupState.OUT, [])
    group = running(groups)
    assert (group.state, groups.running, groups.num_running) == (GroupState.RUNNING, [group], 1)
    groups.remove(group)
    assert (groups.num_running, groups.blocks.num_free) == (0, 32)


def test_lists_of_running_sequences_are_built_only_after_a_change() -> None:
    groups = make_groups()
    group = running(groups, n=2)
    batch = groups.decodes
    assert batch.sequences == group.sequences
    groups.refresh()
    assert groups.decodes is batch
    groups.finish(group.sequences[0])
    groups.refresh()
    assert groups.decodes.sequences == group.sequences[1:]


def test_a_fork_shares_the_prompt_and_marks_the_partly_filled_block_as_shared() -> None:
    groups = make_groups()
    group = running(groups, tokens=6, n=3)
    tables = [sequence.block_table for sequence in group.sequences]
    assert tables[0] == tables[1] == tables[2]
    assert [groups.blocks.ref_counts[block] for block in tables[0]] == [3, 3]
    assert groups.input_batch.shares_tail[[sequence.row for sequence in group.sequences]].all()


@pytest.mark.parametrize(
    ("mode", "n", "swaps"), [("swap", 1, True), ("recompute", 3, False), ("auto", 3, True), ("auto", 1, False)]
)
def test_preemption_swaps_or_recomputes_by_its_mode(mode: str, n: int, swaps: bool) -> None:
    groups = make_groups(mode)
    group = running(groups, n=n)
    table = list(group.sequences[0].block_table)
    step = Step(DecodeBatch.of([]))
    groups.preempt(step, group)
    assert groups.num_running == 0
    assert all(sequence.row < 0 and not sequence.block_table for sequence in group.sequences)
    if not swaps:
        assert group.state is GroupState.WAITING
        assert groups.waiting[1][0] is group
        assert [sequence.num_computed for sequence in group.sequences] == [0] * n
        assert groups.counters.recomputed == groups.num_preemptions == 1
        return
    assert group.state is GroupState.SWAPPED
    assert [copy.source for copy in step.swap_out] == table, "a shared block moves once"
    groups.swap_in(step, group)
    # The prompt's full block is still in the prefix cache of the device, so only the other one is copied.
    assert [copy.source for copy in step.swap_in] == [step.swap_out[1].target]
    assert all(isinstance(copy, Copy) for copy in step.swap_in)
    assert group.state is GroupState.RUNNING
    check_groups(groups)


def test_a_group_is_recomputed_if_host_memory_does_not_suffice() -> None:
    groups = make_groups("swap", num_host_blocks=1)
    group = running(groups)
    groups.preempt(Step(DecodeBatch.of([])), group)
    assert group.state is GroupState.WAITING


def test_running_groups_are_in_order_of_class_and_arrival() -> None:
    groups = make_groups()
    for arrival, priority in ((0, 2), (1, 0), (2, 2), (3, 1)):
        running(groups, tokens=2, arrival=arrival, priority=priority)
    assert [group.order for group in groups.running] == [(0, 1), (1, 3), (2, 0), (2, 2)]


def test_beams_continue_their_parents_and_free_the_ones_without_a_child() -> None:
    groups = make_groups()
    group = running(groups, n=3)
    kept, dropped = group.sequences[1], group.sequences[0]
    groups.branch(group, [1, 1, 2])
    assert group.sequences[0] is kept
    assert group.sequences[1].block_table == kept.block_table
    assert group.sequences[1].token_ids == kept.token_ids
    assert [sequence.choice for sequence in group.sequences] == [0, 1, 2]
    assert (dropped.row, dropped.block_table) == (-1, [])


def test_rows_are_free_unless_a_waiting_group_will_take_them_and_none_is_while_blocks_are_short() -> None:
    engine = make_engine(num_blocks=20, max_num_batched_tokens=80)
    engine.add(request("long", (1,) * 72, max_tokens=4))
    free = [engine.groups.num_free_rows()]
    for name in ("a", "b"):
        engine.add(request(name, (2, 3), max_tokens=2))
        free.append(engine.groups.num_free_rows())
    assert free == [7, 6, 0], "the waiting groups will take all blocks"
    run(engine)
    assert engine.groups.num_free_rows() == 8
    assert swapped_engine().groups.num_free_rows() == 0, "the swapped group will take the free blocks"


def test_preemptible_rows_are_those_of_lower_classes_that_no_waiting_group_will_take() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.add(request("low", (1, 2), n=3), priority=2)
    engine.step()
    engine.add(request("also low", (1, 2), n=2), priority=2)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [3, 3, 0]
    engine.add(request("standard", (1, 2), n=2), priority=1)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [3, 1, 0]
    engine.add(request("urgent", (1, 2), n=2), priority=0)
    assert [engine.groups.num_preemptible_rows(priority) for priority in range(3)] == [1, 0, 0]
    run(engine)


END = 0


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best", "goes_on"),
    [
        ("false", 1.0, -1.9, True),  # -0.95 a token is better than the worst that ended, -1.0
        ("false", 1.0, -2.0, False),  # as good is not better
        ("never", 1.0, -2.2, True),  # better still, were it drawn out to ten tokens
        ("never", 0.5, -2.2, True),
        ("true", 1.0, -1.9, False),
        ("never", -1.0, -1.7, True),  # that would only make it worse here
    ],
)
def test_a_full_search_continues_while_a_better_beam_is_possible(
    early_stopping: str, length_penalty: float, best: float, goes_on: bool
) -> None:
    params = SamplingParams(
        10, n=2, temperature=0.0, beam_width=2, length_penalty=length_penalty, early_stopping=early_stopping
    )
    search = BeamSearch(params, frozenset([END]))
    first = search.advance(np.float32([[-1.0, -1.25, -1.5, -9]]), np.int32([[END, 5, 6, 7]]), [()])
    assert first == [(0, 5), (0, 6)]
    logprobs, token_ids = np.float32([[-0.6, best + 1.25, -9, -9]] * 2), np.int32([[END, 5, 6, 7]] * 2)
    logprobs[1] = -9
    found = search.advance(logprobs, token_ids, [(5,), (6,)])
    assert {one.token_ids for one in search.ended} == {(END,), (5, END)}
    assert search.ended[0].score > search.ended[1].score
    assert (found is not None) == goes_on


def test_all_beams_continue_even_if_every_end_token_of_each_is_likelier() -> None:
    search = BeamSearch(SamplingParams(10, temperature=0.0, beam_width=2, early_stopping="never"), frozenset([0, 1, 2]))
    count = search.num_candidates
    logprobs, token_ids = -np.arange(1, count + 1, dtype=np.float32)[None], np.arange(count, dtype=np.int32)[None]
    assert search.advance(logprobs, token_ids + 3, [()]) == [(0, 3), (0, 4)]
    logprobs[:, 3:] -= 9
    assert search.advance(logprobs.repeat(2, 0), token_ids.repeat(2, 0), [(3,), (4,)]) == [(0, 3), (0, 4)]
    assert [one.token_ids for one in search.ended] == [(3, 0), (3, 1)], "what ends below the first places is left out"
