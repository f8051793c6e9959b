"""Tensors: the KV cache in memory, and a scheduled step as one forward batch.

Decoding sequences are gathered from the persistent rows with a few vector operations; chunks of prompts follow one by
one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.step import Step
from quire.worker.models.batch import ForwardBatch

# A token that is computed but whose K and V are not written.
NOWHERE = -1


class Inputs(NamedTuple):
    """What a step gives the model, as `ForwardBatch` has it; block tables are those of `rows`."""

    token_ids: np.ndarray  # int32 [T]; PENDING for what only the device knows, in the first S places
    positions: np.ndarray  # int32 [T]
    slots: np.ndarray  # int32 [T]
    rows: np.ndarray  # int64 [S], of the persistent arrays
    lengths: np.ndarray  # int32 [S]
    starts: np.ndarray  # int32 [S + 1]
    sampled: np.ndarray  # int64 [R]


class Runner:
    """Owns the model and the cache that its sequences' block tables point into.

    looks_ahead: whether a step may be launched before the tokens of the one before are known (`DeviceRunner`).
    """

    looks_ahead = False

    def __init__(self, model: Any, limits: EngineLimits, rows: InputBatch) -> None:
        self.model = model
        self.limits = limits
        self.rows = rows
        self.kv_cache = model.alloc_kv_cache(limits.num_blocks, limits.block_size, limits.num_host_blocks)
        self._token_ids = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)
        self._positions = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)
        self._slots = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)

    def execute(self, step: Step) -> torch.Tensor:
        """Compute a step and return the logits of its sampled rows, decodes first: [R, vocab] float32."""
        self.move_blocks(step)
        batch = self._build(step)
        with torch.inference_mode():
            logits: torch.Tensor = self.model.forward(batch, self.kv_cache)
        return logits

    def move_blocks(self, step: Step) -> None:
        """One batched move of each kind."""
        for move, copies in (
            (self.kv_cache.swap_out, step.swap_out),
            (self.kv_cache.swap_in, step.swap_in),
            (self.kv_cache.copy_blocks, step.copies),
        ):
            if copies:
                move([copy.source for copy in copies], [copy.target for copy in copies])

    def _build(self, step: Step) -> ForwardBatch:
        inputs, rows = self._inputs(step), self.rows
        widest = -(-int(inputs.lengths.max()) // self.limits.block_size)
        return ForwardBatch(
            token_ids=torch.from_numpy(inputs.token_ids),
            positions=torch.from_numpy(inputs.positions),
            slot_mapping=torch.from_numpy(inputs.slots),
            block_tables=torch.from_numpy(rows.block_tables[inputs.rows, :widest]),
            seq_lens=torch.from_numpy(inputs.lengths),
            query_start_loc=torch.from_numpy(inputs.starts),
            logits_rows=torch.from_numpy(inputs.sampled),
        )

    def _inputs(self, step: Step) -> Inputs:
        rows, size = self.rows, self.limits.block_size
        at, decoding = len(step.decodes), step.decodes.rows
        lengths = rows.lengths[decoding]
        positions = lengths - 1
        self._token_ids[:at] = rows.last_tokens[decoding]
        self._positions[:at] = positions
        self._slots[:at] = rows.block_tables[decoding, positions // size] * size + positions % size
        if not step.chunks:
            all_rows, starts, sampled = decoding, np.arange(at + 1, dtype=np.int32), np.arange(at)
        else:
            ends, chunk_rows, chunk_lengths, chunk_sampled = [], [], [], []
            for sequence, count, is_sampled in ((c.sequence, c.num_tokens, c.is_sampled) for c in step.chunks):
                first, end = sequence.num_computed, at + count
                chunk = np.arange(first, first + count, dtype=np.int32)
                self._token_ids[at:end] = sequence.token_ids[first : first + count]
                self._positions[at:end] = chunk
                self._slots[at:end] = rows.block_tables[sequence.row, chunk // size] * size + chunk % size
                if first < sequence.num_stored:
                    self._slots[at : at + sequence.num_stored - first] = NOWHERE
                chunk_rows.append(sequence.row)
                chunk_lengths.append(first + count)
                ends.append(end)
                if is_sampled:
                    chunk_sampled.append(end - 1)
                at = end
            decodes = len(decoding)
            all_rows = np.concatenate([decoding, chunk_rows]).astype(np.int64)
            lengths = np.concatenate([lengths, chunk_lengths]).astype(np.int32)
            starts = np.concatenate([np.arange(decodes + 1), ends]).astype(np.int32)
            sampled = np.concatenate([np.arange(decodes), chunk_sampled]).astype(np.int64)
        columns = self._token_ids[:at], self._positions[:at], self._slots[:at]
        return Inputs(*columns, all_rows, lengths, starts, sampled)

    def check(self) -> None:
        """Raise if the device is lost: after some errors every later call fails, until the process ends."""
        self.model.check()

    def capture_next(self) -> bool:
        """Prepare one more thing that makes later steps faster; False if there is nothing left (`DeviceRunner`)."""
        return False
