"""The forward batch that a step becomes: tokens, positions, slots, tables and the rows whose logits are wanted."""

from __future__ import annotations

import numpy as np

from quire.shared.messages import SamplingParams
from quire.worker.device.runner import NOWHERE, Runner
from quire.worker.engine.blocks import Copy
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step
from tests.support.mock_model import MockCache, MockModel

SIZE = 4
LIMITS = EngineLimits(
    num_blocks=16, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, num_host_blocks=4
)


def running(batch: InputBatch, tokens: int, table: list[int]) -> Sequence:
    group = SequenceGroup("r", tuple(range(10, 10 + tokens)), SamplingParams(4))
    group.start()
    batch.reserve(group, 1)
    [sequence] = group.sequences
    sequence.block_table = table
    batch.assign(sequence)
    return sequence


def test_decodes_come_first_and_chunks_follow_in_their_blocks() -> None:
    batch = InputBatch(LIMITS)
    runner = Runner(MockModel(), LIMITS, batch)
    decoding, prefilling, whole = running(batch, 6, [3, 5]), running(batch, 9, [7, 8, 9]), running(batch, 2, [1])
    prefilling.num_computed = 4
    chunks = [PrefillChunk(prefilling, 3, is_sampled=False), PrefillChunk(whole, 2, is_sampled=True)]
    built = runner._build(Step(DecodeBatch.of([decoding]), chunks))
    assert built.token_ids.tolist() == [15, 14, 15, 16, 10, 11]
    assert built.positions.tolist() == [5, 4, 5, 6, 0, 1]
    assert built.slot_mapping.tolist() == [5 * SIZE + 1, 8 * SIZE, 8 * SIZE + 1, 8 * SIZE + 2, SIZE, SIZE + 1]
    assert built.seq_lens.tolist() == [6, 7, 2]
    assert built.query_start_loc.tolist() == [0, 1, 4, 6]
    assert built.logits_rows.tolist() == [0, 5]
    assert built.block_tables.tolist() == [[3, 5], [7, 8], [1, 0]]


def test_tokens_whose_keys_are_in_the_cache_already_are_not_written_again() -> None:
    batch = InputBatch(LIMITS)
    runner = Runner(MockModel(), LIMITS, batch)
    sequence = running(batch, 8, [2, 4])
    sequence.num_computed, sequence.num_stored = 7, 8
    built = runner._build(Step(DecodeBatch.of([]), [PrefillChunk(sequence, 1, is_sampled=True)]))
    assert built.slot_mapping.tolist() == [NOWHERE]
    assert built.positions.tolist() == [7]


def test_blocks_move_out_then_in_then_between_each_other() -> None:
    runner = Runner(MockModel(), LIMITS, InputBatch(LIMITS))
    cache = runner.kv_cache
    assert isinstance(cache, MockCache)
    cache.device[:] = np.arange(16)[:, None, None]
    runner.move_blocks(
        Step(DecodeBatch.of([]), swap_out=[Copy(5, 1)], swap_in=[Copy(1, 6)], copies=[Copy(6, 7), Copy(3, 5)])
    )
    assert [int(cache.device[block, 0, 0]) for block in (5, 6, 7)] == [3, 5, 5]
