"""The runner for a device that computes asynchronously while the host prepares the next step.

The tokens of a step stay on the device as inputs of the next one, so the host launches step N + 1 before it knows the
tokens of step N. The block tables are on the device too, and only changes are sent. A step is one small copy to the
device and, on CUDA, one graph. The sampled tokens come back by an asynchronous copy.

    decode    last tokens, positions, slots, changes of tables -> model -> sample -> last tokens    one graph
    execute   token ids, positions, slots, ... -> model -> logits               one graph; then `sample`

All operations are in the order of one stream. So a block may be given to another sequence as soon as the last step that
uses it has been launched, before it has run. No call here waits for the device: inputs go through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from quire.kernels.ops import AdapterBatch
from quire.worker.device.cuda.graphs import DRAWN, GREEDY, MIXED, GraphBucket, Graphs, Record, record_on_cuda
from quire.worker.device.cuda.staging import Column, Number, Staging, StagingField, pinned_buffers
from quire.worker.engine.forward_batch import ForwardBatch, TokenEmbeddings
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import MAX_SCORED_POSITIONS, EngineLimits
from quire.worker.engine.paged_model import PagedModel
from quire.worker.engine.randomness import uniform
from quire.worker.engine.runner import NOWHERE, Inputs, Runner, StepOutput
from quire.worker.engine.sequence import PENDING
from quire.worker.engine.step import Step
from quire.worker.engine.transfers import SampledTokens, send

# Values of a row of padding: one token, and the cheapest parameters of a draw. All other columns are 0.
FILLERS = {"lengths": 1, "slots": NOWHERE, "temperatures": 1, "top_ps": 1}
NO_CHANGES = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)


def decode_fields(count: int) -> list[StagingField]:
    """Return the columns of a step that only decodes, including the parameters of draws."""
    types: dict[str, type[Number]] = {
        "rows": np.int64,
        "lengths": np.int32,
        "positions": np.int32,
        "slots": np.int32,
        "changed_cells": np.int64,  # entries of the block tables, as one dimension
        "changed_blocks": np.int32,
        "uniforms": np.float64,
        "temperatures": np.float32,
        "top_ks": np.int32,
        "top_ps": np.float32,
        "min_ps": np.float32,
    }
    return [StagingField(name, number_type, count) for name, number_type in types.items()]


def input_fields(tokens: int, sequences: int, sampled: int) -> list[StagingField]:
    """Return the columns of `Inputs`, for steps of any kind."""
    return [
        StagingField("rows", np.int64, sequences),
        StagingField("sampled", np.int64, sampled),
        StagingField("lengths", np.int32, sequences),
        StagingField("starts", np.int32, sequences + 1),
        StagingField("token_ids", np.int32, tokens),
        StagingField("positions", np.int32, tokens),
        StagingField("slots", np.int32, tokens),
    ]


class DeviceRunner(Runner):
    """Owns the model, its cache and, on the device, the block tables and last tokens of all running sequences.

    graph_buckets: the buckets of the CUDA graphs to capture. record: records a graph; tests replace it.
    """

    looks_ahead = True

    def __init__(
        self,
        model: PagedModel,
        limits: EngineLimits,
        input_batch: InputBatch,
        graph_buckets: Iterable[GraphBucket] = (),
        record: Record = record_on_cuda,
    ) -> None:
        super().__init__(model, limits, input_batch)
        self.device = model.ops.device
        count, columns = limits.max_num_seqs, input_batch.block_tables.shape[1]
        # The extra last row is for padding: one token, whose K and V are not written.
        self._tables = torch.zeros((count + 1, columns), dtype=torch.int32, device=self.device)
        self._last_tokens = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
        self._padding = count
        self._staging = Staging(decode_fields(count + 1), self.device)
        buckets = list(graph_buckets)
        max_tokens = max([limits.max_num_batched_tokens, *(bucket.num_tokens for bucket in buckets)])
        self._inputs_staging = Staging(input_fields(max_tokens, count, count + MAX_SCORED_POSITIONS), self.device)
        self._starts = torch.arange(count + 2, dtype=torch.int32, device=self.device)
        self._all_rows = torch.arange(count + 1, dtype=torch.int64, device=self.device)
        self.sampled = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
        self._hosts = pinned_buffers(count + 1, torch.int32, self.device)
        # Logits of graphs, outside of their pool: another graph may overwrite everything in the pool.
        max_sequences = max((bucket.num_sequences for bucket in buckets if bucket.kind == MIXED), default=0)
        self._logits = torch.zeros((max_sequences, model.vocab_size), dtype=torch.float32, device=self.device)
        self.graphs = Graphs(buckets, self._stage_padding, self._launch, record)
        input_batch.changes = []

    # --- steps that only decode ---------------------------------------------------------------------------------------

    def decode(self, step: Step) -> SampledTokens | None:
        rows = step.decodes.rows
        if step.chunks or not step.decodes or self._has_adapters(step) or self.input_batch.needs_logits[rows].any():
            return None
        self.move_blocks(step)
        self._send_last_tokens(rows)
        draws = bool(self.input_batch.is_drawn[rows].any())
        count = len(rows)
        if captured := self.graphs.find(DRAWN if draws else GREEDY, count, count):
            bucket, graph = captured
            self._stage_decode(rows, bucket.num_sequences, draws)
            with torch.inference_mode():
                graph.replay()
        else:
            self._stage_decode(rows, count, draws)
            with torch.inference_mode():
                self._decode(count, draws)
        return self._fetch(count)

    def _has_adapters(self, step: Step) -> bool:
        batch = self.input_batch
        return bool(batch.num_adapted) and any(batch.adapters[row] is not None for row in step.decodes.rows.tolist())

    def _stage_decode(self, rows: np.ndarray, width: int, draws: bool) -> None:
        """Send the inputs of a decode step, padded to `width` sequences, and the changes of the block tables.

        Usually a sequence gets at most one block. More changes than `width` are sent on their own.
        """
        changed = self._changed_cells()
        if len(changed[0]) > width:
            self._send_cells(*changed)
            changed = NO_CHANGES
        self._staging.send(self._decode_columns(rows, width, draws, *changed))

    def _decode_columns(
        self, rows: np.ndarray, width: int, draws: bool, cells: np.ndarray, blocks: np.ndarray
    ) -> dict[str, Column]:
        """Return the columns of a decode step, padded to `width` sequences.

        cells, blocks: at most `width` entries of the block tables. The padding writes 0 to the table of the row of
        padding, whose tokens are not written to the cache.
        """
        lengths = self.input_batch.lengths[rows]
        positions = lengths - 1
        columns = {"rows": rows, "lengths": lengths, "positions": positions + self.input_batch.offsets[rows]}
        columns |= {"slots": self._decode_slots(rows, positions), "changed_cells": cells, "changed_blocks": blocks}
        if draws:
            columns |= self._draw_columns(rows)
        fillers = FILLERS | {"rows": self._padding, "changed_cells": self._padding * self._tables.shape[1]}
        return {name: Column(column, width, fillers.get(name, 0)) for name, column in columns.items()}

    def _draw_columns(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        batch = self.input_batch
        numbers = uniform(batch.seeds[rows], batch.choices[rows], batch.lengths[rows].astype(np.uint64))
        return {
            "uniforms": numbers * batch.is_drawn[rows],
            "temperatures": batch.temperatures[rows],
            "top_ks": batch.top_ks[rows],
            "top_ps": batch.top_ps[rows],
            "min_ps": batch.min_ps[rows],
        }

    def _decode(self, count: int, draws: bool) -> None:
        """Launch a decode step from the staged columns: one token for each of the first `count` rows."""
        staged = self._staging.on_device
        self._tables.view(-1).index_copy_(0, staged["changed_cells"][:count], staged["changed_blocks"][:count])
        rows = staged["rows"][:count]
        batch = ForwardBatch(
            token_ids=self._last_tokens[rows],
            positions=staged["positions"][:count],
            slot_mapping=staged["slots"][:count],
            block_tables=self._tables[rows],
            seq_lens=staged["lengths"][:count],
            query_start_loc=self._starts[: count + 1],
            logits_rows=self._all_rows[:count],
        )
        logits = self.model.forward(batch, self.kv_cache)
        self._store(rows, self._choose_tokens(logits, draws))

    def _choose_tokens(self, logits: torch.Tensor, draws: bool) -> torch.Tensor:
        """Return one token for each row of logits: the most probable, or one drawn by the staged parameters."""
        ops, count = self.model.ops, len(logits)
        if not draws:
            return ops.argmax(logits)
        names = ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
        return ops.sample(logits, *(self._staging.on_device[name][:count] for name in names))

    def _store(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the tokens as inputs of the next step, and for `_fetch`."""
        self._last_tokens.index_copy_(0, rows, tokens)
        self.sampled[: len(tokens)].copy_(tokens)

    def _fetch(self, count: int) -> SampledTokens:
        """Start the copy of the tokens to the host."""
        host, copied = self._hosts[0]
        self._hosts.rotate(-1)
        host[:count].copy_(self.sampled[:count], non_blocking=True)
        copied.set()
        return SampledTokens(host, count, copied)

    # --- any step -----------------------------------------------------------------------------------------------------

    def execute(self, step: Step) -> StepOutput | None:
        """Launch a step of any kind. A step with adapters or images, or whose hidden states are wanted, is
        launched without a graph.

        The output is on the device, and valid until the next step. Returns None if the step does not fit into device
        memory; then only the blocks have moved.
        """
        self.move_blocks(step)
        self._send_cells(*self._changed_cells())
        inputs = self._inputs(step)
        tokens, sequences, sampled = len(inputs.token_ids), len(inputs.rows), len(inputs.sampled)
        graph_rows = max(sequences, sampled)
        adapters = self._adapters(inputs)
        is_plain = not len(inputs.pooled) and adapters is None and step.embeddings is None
        if is_plain and (captured := self.graphs.find(MIXED, tokens, graph_rows)):
            bucket, graph = captured
            self._stage(inputs, bucket)
            with torch.inference_mode():
                graph.replay()
            return StepOutput(self._logits[:sampled])
        try:
            return self._forward(inputs, adapters, step.embeddings)
        except torch.OutOfMemoryError:
            if step.num_tokens <= self.limits.max_num_seqs:
                raise
        torch.cuda.empty_cache()  # not in the except block: the error's traceback still holds activations
        return None

    def _forward(self, inputs: Inputs, adapters: AdapterBatch | None, embeddings: TokenEmbeddings | None) -> StepOutput:
        tokens, sequences = len(inputs.token_ids), len(inputs.rows)
        self._stage(inputs, GraphBucket(MIXED, tokens, sequences))
        pooled_rows = self._send(inputs.pooled) if len(inputs.pooled) else None
        with torch.inference_mode():
            batch = self._mixed_batch(tokens, sequences, len(inputs.sampled))
        return self._run_model(replace(batch, pooled_rows=pooled_rows, adapters=adapters, embeddings=embeddings))

    def _stage(self, inputs: Inputs, bucket: GraphBucket) -> None:
        """Send the inputs of a step, padded to a bucket.

        Padding tokens belong to no sequence, and their K and V are not written; padding sequences have no tokens.
        """
        tokens, sequences = bucket.num_tokens, bucket.num_sequences
        self._inputs_staging.send(
            {
                "rows": Column(inputs.rows, sequences, self._padding),
                "sampled": Column(inputs.sampled, max(sequences, len(inputs.sampled)), 0),
                "lengths": Column(inputs.lengths, sequences, 0),
                "starts": Column(inputs.starts, sequences + 1, inputs.starts[-1]),
                "token_ids": Column(inputs.token_ids, tokens, 0),
                "positions": Column(inputs.positions, tokens, 0),
                "slots": Column(inputs.slots, tokens, NOWHERE),
            }
        )

    def _mixed_batch(self, tokens: int, sequences: int, sampled: int) -> ForwardBatch:
        """Return the batch of the staged inputs, with these numbers of tokens, sequences and sampled rows."""
        staged = self._inputs_staging.on_device
        rows, token_ids = staged["rows"][:sequences], staged["token_ids"][:tokens]
        # Decodes come first, with one token each, so token i belongs to row i wherever it is pending.
        first = token_ids[:sequences]
        known = torch.where(first == PENDING, self._last_tokens[rows], first)
        return ForwardBatch(
            token_ids=torch.cat([known, token_ids[sequences:]]),
            positions=staged["positions"][:tokens],
            slot_mapping=staged["slots"][:tokens],
            block_tables=self._tables[rows],
            seq_lens=staged["lengths"][:sequences],
            query_start_loc=staged["starts"][: sequences + 1],
            logits_rows=staged["sampled"][:sampled],
        )

    def sample(self, logits: torch.Tensor, rows: np.ndarray) -> SampledTokens:
        draws = bool(self.input_batch.is_drawn[rows].any())
        columns = {"rows": rows} | (self._draw_columns(rows) if draws else {})
        self._staging.send({name: Column(column) for name, column in columns.items()})
        with torch.inference_mode():
            self._store(self._staging.on_device["rows"][: len(rows)], self._choose_tokens(logits, draws))
        return self._fetch(len(rows))

    # --- graphs -------------------------------------------------------------------------------------------------------

    def capture_next(self) -> bool:
        return self.graphs.capture_next()

    def check(self) -> None:
        super().check()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _launch(self, bucket: GraphBucket) -> None:
        """Launch what the graph of a bucket records."""
        if bucket.kind == MIXED:
            batch = self._mixed_batch(bucket.num_tokens, bucket.num_sequences, bucket.num_sequences)
            logits = self.model.forward(batch, self.kv_cache)
            self._logits[: bucket.num_sequences].copy_(logits)
        else:
            self._decode(bucket.num_sequences, bucket.kind == DRAWN)

    def _stage_padding(self, bucket: GraphBucket) -> None:
        """Stage a step that is all padding, and so changes nothing."""
        none = np.zeros(0, dtype=np.int32)
        if bucket.kind == MIXED:
            no_rows, starts = none.astype(np.int64), np.zeros(1, dtype=np.int32)
            inputs = Inputs(
                token_ids=none, positions=none, slots=none, rows=no_rows, lengths=none, starts=starts, sampled=none
            )
            self._stage(inputs, bucket)
        else:
            columns = self._decode_columns(
                none.astype(np.int64), bucket.num_sequences, bucket.kind == DRAWN, *NO_CHANGES
            )
            self._staging.send(columns)

    # --- state of the device ------------------------------------------------------------------------------------------

    def _changed_cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries of the block tables that the device does not know yet: places int64 and blocks int32.

        The caller must send them.
        """
        changes = self.input_batch.changes
        if not changes:
            return NO_CHANGES
        num_columns = self._tables.shape[1]
        cells = np.unique(np.concatenate([rows * num_columns + columns for rows, columns in changes]))
        changes.clear()
        return cells, self.input_batch.block_tables.reshape(-1)[cells]

    def _send_cells(self, cells: np.ndarray, blocks: np.ndarray) -> None:
        """Bring the block tables on the device up to date, apart from the inputs of a step."""
        if len(cells):
            self._tables.view(-1).index_copy_(0, self._send(cells), self._send(blocks))

    def _send_last_tokens(self, rows: np.ndarray) -> None:
        """Send last tokens that the host knows, since the device may not have them."""
        last_tokens = self.input_batch.last_tokens
        known = rows[last_tokens[rows] != PENDING]
        if len(known):
            self._last_tokens.index_copy_(0, self._send(known), self._send(last_tokens[known]))

    def _send(self, values: np.ndarray) -> torch.Tensor:
        return send(torch.from_numpy(values), self.device)
