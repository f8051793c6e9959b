"""What a decode step needs of every running sequence, as arrays that persist over steps.

A sequence has one row from the time it gets blocks until it gives them up, and only what changes is written: a new
block is one number. So a steady step is a few vector operations, however many sequences run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.worker.engine.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from quire.worker.engine.limits import EngineLimits

# Of `InputBatch.top_logprobs`.
NO_LOGPROBS = -1


class InputBatch:
    """Arrays with one row per running sequence, [max_num_seqs]."""

    def __init__(self, limits: EngineLimits) -> None:
        count = limits.max_num_seqs
        columns = -(-limits.max_model_len // limits.block_size)
        self.block_size = limits.block_size
        self.block_tables = np.zeros((count, columns), dtype=np.int32)
        self.lengths = np.zeros(count, dtype=np.int32)  # tokens that are known
        self.prompt_lengths = np.zeros(count, dtype=np.int32)
        self.capacities = np.zeros(count, dtype=np.int32)  # slots of the blocks in the table
        # Whether the block that the next token is written into may have other owners.
        self.shares_tail = np.zeros(count, dtype=np.bool_)
        self.last_tokens = np.zeros(count, dtype=np.int32)
        # Sampling parameters, as `quire.kernels.ops.Ops.sample` takes them.
        self.temperatures = np.zeros(count, dtype=np.float32)
        self.top_ks = np.zeros(count, dtype=np.int32)
        self.top_ps = np.zeros(count, dtype=np.float32)
        self.min_ps = np.zeros(count, dtype=np.float32)
        self.seeds = np.zeros(count, dtype=np.uint64)
        self.choices = np.zeros(count, dtype=np.uint64)
        self.max_lengths = np.zeros(count, dtype=np.int32)
        # What makes a row more than an ordinary one.
        self.is_drawn = np.zeros(count, dtype=np.bool_)  # by chance; else greedy
        self.is_adjusted = np.zeros(count, dtype=np.bool_)  # penalties, biases, bans or a grammar change its logits
        self.is_watched = np.zeros(count, dtype=np.bool_)  # stop strings and stop tokens
        self.is_scored = np.zeros(count, dtype=np.bool_)  # log-probabilities are asked for, or ranked by
        self.top_logprobs = np.full(count, NO_LOGPROBS, dtype=np.int8)  # of how many tokens they are asked for
        self.is_beam = np.zeros(count, dtype=np.bool_)
        self.ignores_eos = np.zeros(count, dtype=np.bool_)
        # Entries of block_tables that changed, as rows and columns; a runner that keeps the tables elsewhere sets and
        # empties it.
        self.changes: list[tuple[np.ndarray, np.ndarray]] | None = None
        self.num_reserved = 0
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that are neither taken nor kept for a group."""
        return len(self._free) - self.num_reserved

    def assign(self, sequence: Sequence) -> None:
        """Give a sequence one of the rows that are kept for its group, and write all that is known of it there."""
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
        self.last_tokens[row] = sequence.token_ids[-1]
        self.shares_tail[row] = False
        self.temperatures[row] = params.temperature
        self.top_ks[row] = params.top_k
        self.top_ps[row] = params.top_p
        self.min_ps[row] = params.min_p
        self.seeds[row] = params.seed
        self.choices[row] = sequence.choice
        self.max_lengths[row] = sequence.num_prompt_tokens + params.max_tokens
        self.is_drawn[row] = params.temperature > 0
        self.is_adjusted[row] = bool(
            group.has_penalties
            or params.logit_bias
            or (params.min_tokens > 0 and not params.ignore_eos)
            or params.json_schema
        )
        self.is_watched[row] = bool(params.stop or params.stop_token_ids)
        self.is_scored[row] = not params.beam_width and (params.logprobs or not params.is_streamed)
        self.top_logprobs[row] = params.top_logprobs if params.logprobs else NO_LOGPROBS
        self.is_beam[row] = bool(params.beam_width)
        self.ignores_eos[row] = params.ignore_eos

    def release(self, sequence: Sequence, keep: bool = False) -> None:
        """Take the row of a sequence back; `keep` it for another sequence of its group."""
        self._free.append(sequence.row)
        sequence.row = -1
        if keep:
            self.reserve(sequence.group, 1)

    def reserve(self, group: SequenceGroup, count: int) -> None:
        """Keep `count` free rows for sequences of a group; a negative count gives them up."""
        group.num_reserved_rows += count
        self.num_reserved += count

    def add_block(self, sequence: Sequence) -> None:
        """The last block of the table is new."""
        row, count = sequence.row, len(sequence.block_table)
        self.capacities[row] = count * self.block_size
        self.replace_block(sequence, count - 1)

    def add_blocks(self, at: np.ndarray, blocks: list[int]) -> None:
        """One more block for each of the rows `at`."""
        capacities = self.capacities[at]
        columns = capacities // self.block_size
        self.block_tables[at, columns] = blocks
        if self.changes is not None:
            self.changes.append((at, columns))
        self.capacities[at] = capacities + self.block_size

    def replace_block(self, sequence: Sequence, index: int) -> None:
        """A block of the table has become another one."""
        self.block_tables[sequence.row, index] = sequence.block_table[index]
        if self.changes is not None:
            self.changes.append((np.array([sequence.row]), np.array([index])))
