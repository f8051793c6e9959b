"""Tensors: the KV cache in memory, and a scheduled step as one forward batch.

Arrays persist over steps: a sequence has a row from admission to its end, and only new blocks are written into its
row of the block tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.engine.scheduler import EngineLimits, ScheduledSequence
from worker.models.batch import ForwardBatch

if TYPE_CHECKING:
    from worker.models.decoder import Decoder


class Runner:
    """Owns the model and the cache that its sequences' block tables point into."""

    def __init__(self, model: Decoder, limits: EngineLimits) -> None:
        self.model = model
        self.limits = limits
        self.kv_cache = model.alloc_kv_cache(limits.num_blocks, limits.block_size)
        columns = -(-limits.max_model_len // limits.block_size)
        self._block_tables = np.zeros((limits.max_num_seqs, columns), dtype=np.int32)
        self._token_ids = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)
        self._positions = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)
        self._slots = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)

    def execute(self, step: list[ScheduledSequence]) -> torch.Tensor:
        """Compute a step and return the logits of its sampled sequences, in their order: [R, vocab] float32."""
        batch = self._build(step)
        with torch.inference_mode():
            return self.model.forward(batch, self.kv_cache)

    def _build(self, step: list[ScheduledSequence]) -> ForwardBatch:
        block_size = self.limits.block_size
        starts = [0]
        rows, lengths, sampled = [], [], []
        at = 0
        for entry in step:
            sequence, count = entry.sequence, entry.num_tokens
            row, first = sequence.row, sequence.num_computed
            table = self._block_tables[row]
            # Blocks before the one that this step writes into first were written into the row by earlier steps.
            known = first // block_size
            table[known : len(sequence.block_table)] = sequence.block_table[known:]
            end = at + count
            if count == 1:
                self._token_ids[at] = sequence.token_ids[first]
                self._positions[at] = first
                self._slots[at] = sequence.block_table[first // block_size] * block_size + first % block_size
            else:
                positions = np.arange(first, first + count, dtype=np.int32)
                self._token_ids[at:end] = sequence.token_ids[first : first + count]
                self._positions[at:end] = positions
                self._slots[at:end] = table[positions // block_size] * block_size + positions % block_size
            if entry.is_sampled:
                sampled.append(end - 1)
            rows.append(row)
            lengths.append(first + count)
            starts.append(end)
            at = end
        widest = -(-max(lengths) // block_size)
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:at]),
            positions=torch.from_numpy(self._positions[:at]),
            slot_mapping=torch.from_numpy(self._slots[:at]),
            block_tables=torch.from_numpy(self._block_tables[rows, :widest]),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            logits_rows=torch.tensor(sampled, dtype=torch.int64),
        )
