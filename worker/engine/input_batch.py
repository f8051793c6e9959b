"""The input batch: the inputs of every running sequence as arrays that persist from step to step.

A sequence has one row from the time it gets blocks until it gives them up. Only changes are written, such as the number
of a new block. So a steady decode step takes a few vector operations for any number of sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.worker.engine.sequence import Adapter, Sequence, SequenceGroup

if TYPE_CHECKING:
    from quire.worker.engine.limits import EngineLimits

# The value of `InputBatch.top_logprobs` for a request that does not ask for log-probabilities.
NO_LOGPROBS = -1
# A greedy choice as a draw: temperature, top_k, top_p and min_p with which only the largest logits keep their mass. The
# uniform number 0 draws the first of them. The temperature is the smallest normal number of float32.
GREEDY_DRAW = 2.0**-126, 0, 1.0, 1.0


class InputBatch:
    """Arrays with one row per running sequence, [max_num_seqs]."""

    def __init__(self, limits: EngineLimits) -> None:
        count = limits.max_num_seqs
        columns = -(-limits.max_model_len // limits.block_size)
        self.block_size = limits.block_size
        self.block_tables = np.zeros((count, columns), dtype=np.int32)
        self.lengths = np.zeros(count, dtype=np.int32)  # tokens, known or pending
        self.prompt_lengths = np.zeros(count, dtype=np.int32)
        self.offsets = np.zeros(count, dtype=np.int32)  # of positions for RoPE after images
        self.capacities = np.zeros(count, dtype=np.int32)  # slots of the blocks in the table
        # Whether the block that the next token is written to may have other owners.
        self.shares_tail = np.zeros(count, dtype=np.bool_)
        self.last_tokens = np.zeros(count, dtype=np.int32)
        # Sampling parameters, as `quire.kernels.ops.Ops.sample` takes them; GREEDY_DRAW for a greedy row.
        self.temperatures = np.zeros(count, dtype=np.float32)
        self.top_ks = np.zeros(count, dtype=np.int32)
        self.top_ps = np.zeros(count, dtype=np.float32)
        self.min_ps = np.zeros(count, dtype=np.float32)
        self.seeds = np.zeros(count, dtype=np.uint64)
        self.choices = np.zeros(count, dtype=np.uint64)
        self.max_lengths = np.zeros(count, dtype=np.int32)
        # Properties of a row beyond a greedy decode.
        self.is_drawn = np.zeros(count, dtype=np.bool_)  # tokens are drawn at random
        self.is_adjusted = np.zeros(count, dtype=np.bool_)  # penalties, biases, bans or a grammar change the logits
        self.is_watched = np.zeros(count, dtype=np.bool_)  # a stop string, a stop token or repetition may end it
        self.is_scored = np.zeros(count, dtype=np.bool_)  # the request asks for log-probabilities, or is ranked by them
        self.top_logprobs = np.full(count, NO_LOGPROBS, dtype=np.int8)  # tokens with log-probabilities per position
        self.needs_logits = np.zeros(count, dtype=np.bool_)  # is_adjusted or is_scored
        self.is_beam = np.zeros(count, dtype=np.bool_)
        self.ignores_eos = np.zeros(count, dtype=np.bool_)
        self.adapters: list[Adapter | None] = [None] * count
        self.num_adapted = 0  # rows with an adapter
        # Changed entries of block_tables, as rows and columns. None unless a runner keeps a copy of the tables: it sets
        # the list, and clears it after each update of its copy.
        self.changes: list[tuple[np.ndarray, np.ndarray]] | None = None
        self.num_reserved = 0
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that are neither in use nor reserved for a group."""
        return len(self._free) - self.num_reserved

    def assign(self, sequence: Sequence) -> None:
        """Give a sequence one of the rows reserved for its group, and fill in the row."""
        group, params = sequence.group, sequence.group.sampling
        self.reserve(group, -1)
        row = sequence.row = self._free.pop()
        table = sequence.block_table
        self.block_tables[row, : len(table)] = table
        if self.changes is not None:
            self.changes.append((np.full(len(table), row), np.arange(len(table))))
        self.capacities[row] = len(table) * self.block_size
        self.lengths[row] = len(sequence.token_ids)
        self.prompt_lengths[row] = sequence.num_prompt_tokens
        self.offsets[row] = group.images.offset if group.images is not None else 0
        self.last_tokens[row] = sequence.token_ids[-1]
        self.shares_tail[row] = False
        is_drawn = params.temperature > 0
        draw = (params.temperature, params.top_k, params.top_p, params.min_p) if is_drawn else GREEDY_DRAW
        self.temperatures[row], self.top_ks[row], self.top_ps[row], self.min_ps[row] = draw
        self.seeds[row] = params.seed
        self.choices[row] = group.first_choice + sequence.choice
        self.max_lengths[row] = sequence.num_prompt_tokens + params.max_tokens
        self.is_drawn[row] = is_drawn
        self.is_adjusted[row] = group.changes_logits
        self.is_watched[row] = bool(params.stop or params.stop_token_ids or params.repetition_detection)
        self.is_scored[row] = not params.beam_width and (params.logprobs or not params.is_streamed)
        self.top_logprobs[row] = params.top_logprobs if params.logprobs else NO_LOGPROBS
        self.needs_logits[row] = self.is_adjusted[row] or self.is_scored[row]
        self.is_beam[row] = bool(params.beam_width)
        self.ignores_eos[row] = params.ignore_eos
        self.adapters[row] = group.adapter
        self.num_adapted += group.adapter is not None

    def release(self, sequence: Sequence, keep: bool = False) -> None:
        """Free the row of a sequence. keep: reserve it for another sequence of the group."""
        self._free.append(sequence.row)
        self.num_adapted -= self.adapters[sequence.row] is not None
        self.adapters[sequence.row] = None
        sequence.row = -1
        if keep:
            self.reserve(sequence.group, 1)

    def reserve(self, group: SequenceGroup, count: int) -> None:
        """Reserve `count` free rows for sequences of a group; a negative count cancels reservations."""
        group.num_reserved_rows += count
        self.num_reserved += count

    def add_block(self, sequence: Sequence) -> None:
        """Record the block that was just appended to the sequence's table."""
        row, count = sequence.row, len(sequence.block_table)
        self.capacities[row] = count * self.block_size
        self.replace_block(sequence, count - 1)

    def add_blocks(self, rows: np.ndarray, blocks: list[int]) -> None:
        """Record one appended block for each of the rows."""
        capacities = self.capacities[rows]
        columns = capacities // self.block_size
        self.block_tables[rows, columns] = blocks
        if self.changes is not None:
            self.changes.append((rows, columns))
        self.capacities[rows] = capacities + self.block_size

    def replace_block(self, sequence: Sequence, index: int) -> None:
        """Record that entry `index` of the sequence's table is another block now."""
        self.block_tables[sequence.row, index] = sequence.block_table[index]
        if self.changes is not None:
            self.changes.append((np.array([sequence.row]), np.array([index])))
