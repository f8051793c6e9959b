"""The runner: the KV cache in memory, and a scheduled step as one forward batch.

Decoding sequences are gathered from the input batch with a few vector operations; chunks of prompts follow, one by one.
`Runner` waits for each step, and is what the engine expects of any runner. `quire.worker.device.cuda.runner` has the
runner that does not wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels import Interrupt
from quire.kernels.ops import AdapterBatch
from quire.worker.engine.features.adapters import Adapters, adapter_batch
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.paged_model import PagedModel
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.spill import Spill
from quire.worker.engine.step import Step
from quire.worker.engine.transfers import SampledTokens

# Slot of a token whose K and V are not written.
NOWHERE = -1
NO_ROWS = np.zeros(0, dtype=np.int64)


class Inputs(NamedTuple):
    """Inputs of the model for one step, as in `ForwardBatch`; the block tables are those of `rows`."""

    token_ids: np.ndarray  # int32 [T]; in the first S places PENDING for tokens that only the device knows
    positions: np.ndarray  # int32 [T]
    slots: np.ndarray  # int32 [T]
    rows: np.ndarray  # int64 [S], rows of the input batch
    lengths: np.ndarray  # int32 [S]
    starts: np.ndarray  # int32 [S + 1]
    # int64 [R], tokens whose logits are wanted: those that are sampled, those of verifications, those that score
    sampled: np.ndarray
    pooled: np.ndarray = NO_ROWS  # int64 [P], tokens whose hidden states are wanted


class StepOutput(NamedTuple):
    """The results of the model for one step."""

    # float32 [R, V], of the sampled rows, decodes first, then of the verified and of the scored positions.
    logits: torch.Tensor
    # [P, H], hidden states of the last `num_pooled` tokens of each chunk, in the order of the chunks.
    hidden: torch.Tensor | None = None


class Runner:
    """Runs steps of a model, and waits for each. Owns the cache that block tables point into.

    looks_ahead: whether a step may be launched before the tokens of the previous one are known (`DeviceRunner`). Only
    such a runner has `decode`, `sample` and `sampled`.
    """

    looks_ahead = False
    # The tokens of the newest step, in the order of its sequences.
    sampled: torch.Tensor

    def __init__(self, model: PagedModel, limits: EngineLimits, input_batch: InputBatch) -> None:
        self.model = model
        self.limits = limits
        self.input_batch = input_batch
        self.adapters = Adapters()
        self.kv_cache = model.alloc_kv_cache(limits.num_blocks, limits.block_size, limits.num_host_blocks)
        if limits.num_state_slots:
            self.kv_cache = model.alloc_states(self.kv_cache, limits.num_state_slots)
        # Takes evicted blocks before a step overwrites them; None: they are lost.
        self.spill: Spill | None = None
        # Ends the next `execute` early with StepInterrupted when it is requested; None: the step runs to its end.
        self.interrupt: Interrupt | None = None
        self._token_ids = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)
        self._positions = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)
        self._slots = np.zeros(limits.max_num_batched_tokens, dtype=np.int32)

    def execute(self, step: Step) -> StepOutput | None:
        """Compute a step.

        The logits are float32 [R, V]. Returns None if the step does not fit into device memory (`DeviceRunner`); then
        only the blocks have moved.
        """
        self.move_blocks(step)
        return self._run_model(self._build(step))

    def decode(self, step: Step) -> SampledTokens | None:
        """Launch a step that only decodes, including sampling.

        Returns None for any other step, for one with adapters, and for one whose logits are needed, and launches
        nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} does not look ahead")

    def sample(self, logits: torch.Tensor, rows: np.ndarray) -> SampledTokens:
        """Sample one token for each row of logits, by the parameters of these rows of the input batch.

        The device keeps the tokens as inputs of the next step, and in `sampled`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not look ahead")

    def _run_model(self, batch: ForwardBatch) -> StepOutput:
        with torch.inference_mode():
            if batch.pooled_rows is None:
                return StepOutput(self.model.forward(batch, self.kv_cache))
            return StepOutput(*self.model.forward_pooled(batch, self.kv_cache))

    def move_blocks(self, step: Step) -> None:
        """Move blocks: one call for all blocks swapped out, one for all swapped in, one for all copies."""
        if self.spill is not None:
            self.spill.save_evicted()
        for move, copies in (
            (self.kv_cache.swap_out, step.swap_out),
            (self.kv_cache.swap_in, step.swap_in),
            (self.kv_cache.copy_blocks, step.copies),
        ):
            if copies:
                move([copy.source for copy in copies], [copy.target for copy in copies])
        for source, target in step.state_copies:
            assert self.kv_cache.states is not None
            self.kv_cache.states.copy(source, target)

    def _build(self, step: Step) -> ForwardBatch:
        inputs = self._inputs(step)
        max_blocks = -(-int(inputs.lengths.max()) // self.limits.block_size)
        batch = ForwardBatch(
            token_ids=torch.from_numpy(inputs.token_ids),
            positions=torch.from_numpy(inputs.positions),
            slot_mapping=torch.from_numpy(inputs.slots),
            block_tables=torch.from_numpy(self.input_batch.block_tables[inputs.rows, :max_blocks]),
            seq_lens=torch.from_numpy(inputs.lengths),
            query_start_loc=torch.from_numpy(inputs.starts),
            logits_rows=torch.from_numpy(inputs.sampled),
            pooled_rows=torch.from_numpy(inputs.pooled) if len(inputs.pooled) else None,
            adapters=self._adapters(inputs),
            interrupt=self.interrupt,
            embeddings=step.embeddings,
        )
        if not self.model.state_bytes:
            return batch
        snapshots = [(index, 1, slot) for index, slot in step.decode_snapshots]
        for index, chunk in enumerate(step.chunks, len(step.decodes)):
            snapshots += [(index, count, slot) for count, slot in chunk.snapshots]
        return replace(
            batch.to(self.model.ops.device),
            state_slots=torch.from_numpy(inputs.rows),
            snapshots=torch.tensor(snapshots, dtype=torch.int64).view(-1, 3),
        )

    def _adapters(self, inputs: Inputs) -> AdapterBatch | None:
        """Return the adapters of the tokens of a step, or None if no token uses one."""
        wanted = np.concatenate([inputs.sampled, inputs.pooled])
        return adapter_batch(self.input_batch, inputs.rows, inputs.starts, wanted)

    def _inputs(self, step: Step) -> Inputs:
        """Gather the inputs of a step. The arrays of tokens are overwritten by the next call."""
        batch = self.input_batch
        at, decoding = len(step.decodes), step.decodes.rows
        lengths, pooled = batch.lengths[decoding], NO_ROWS
        positions = lengths - 1
        self._token_ids[:at] = batch.last_tokens[decoding]
        self._positions[:at] = positions + batch.offsets[decoding]
        self._slots[:at] = self._decode_slots(decoding, positions)
        if not step.chunks and not step.verifications:
            rows, starts, sampled = decoding, np.arange(at + 1, dtype=np.int32), np.arange(at)
        else:
            ends, chunk_rows, chunk_lengths, chunk_sampled = [], [], [], []
            verified: list[int] = []
            scored: list[int] = []
            chunk_pooled: list[np.ndarray] = []
            for chunk in step.chunks:
                sequence, count = chunk.sequence, chunk.num_tokens
                first, end = sequence.num_computed, at + count
                self._token_ids[at:end] = sequence.token_ids[first : first + count]
                self._place(sequence, first, at, end)
                if first < sequence.num_stored:
                    self._slots[at : at + sequence.num_stored - first] = NOWHERE
                chunk_rows.append(sequence.row)
                chunk_lengths.append(first + count)
                ends.append(end)
                if chunk.num_scored:
                    assert sequence.group.prompt_scores is not None
                    start = at + sequence.group.prompt_scores.num_scored - first
                    scored.extend(range(start, start + chunk.num_scored))
                if chunk.is_sampled:
                    chunk_sampled.append(end - 1)
                if sequence.group.pooling:
                    chunk_pooled.append(np.arange(end - chunk.num_pooled, end))
                at = end
            for verification in step.verifications:
                sequence, first = verification.sequence, verification.sequence.num_computed
                end = at + verification.num_tokens
                self._token_ids[at:end] = (sequence.token_ids[first], *verification.draft)
                self._place(sequence, first, at, end)
                chunk_rows.append(sequence.row)
                chunk_lengths.append(first + verification.num_tokens)
                ends.append(end)
                verified.extend(range(at, end))
                at = end
            decodes = len(decoding)
            rows = np.concatenate([decoding, chunk_rows]).astype(np.int64)
            lengths = np.concatenate([lengths, chunk_lengths]).astype(np.int32)
            starts = np.concatenate([np.arange(decodes + 1), ends]).astype(np.int32)
            sampled = np.concatenate([np.arange(decodes), chunk_sampled, verified, scored]).astype(np.int64)
            pooled = np.concatenate([NO_ROWS, *chunk_pooled])
        token_ids, positions, slots = self._token_ids[:at], self._positions[:at], self._slots[:at]
        return Inputs(token_ids, positions, slots, rows, lengths, starts, sampled, pooled)

    def _place(self, sequence: Sequence, first: int, at: int, end: int) -> None:
        """Fill in positions and slots of the tokens [at, end) of a step: those of a sequence from `first` on."""
        size, images = self.limits.block_size, sequence.group.images
        span = np.arange(first, first + end - at, dtype=np.int32)
        self._positions[at:end] = span if images is None else images.positions(first, first + end - at)
        self._slots[at:end] = self.input_batch.block_tables[sequence.row, span // size] * size + span % size

    def _decode_slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the cache slot of one position of each row, int32 [S]."""
        size = self.limits.block_size
        slots: np.ndarray = self.input_batch.block_tables[rows, positions // size] * size + positions % size
        return slots

    def check(self) -> None:
        """Raise if the device is lost: after some errors all later calls fail until the process ends."""
        self.model.check()

    def capture_next(self) -> bool:
        """Capture one more CUDA graph. Returns False if none is left (`DeviceRunner`)."""
        return False
