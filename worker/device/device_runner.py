"""Running steps on a device that works on its own while the host prepares the next step.

The tokens of a step stay on the device and are the inputs of the next one: the host launches step N + 1 without having
seen what step N drew. The block tables are on the device too, and only what changed is sent. A step is one small copy
to the device and, on CUDA, one graph; its tokens come back by a copy that nobody waits for until they are needed.

    decode    last tokens, tables -> positions, slots -> model -> draw -> last tokens      one graph, draw included
    execute   token ids, positions, slots, ...        -> model -> logits                   one graph; drawn behind it

Everything is in the order of one stream. So a block may be given to another sequence as soon as the last step that uses
it is launched, before it has run. And nothing here may wait for the device: what is sent goes through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from quire.worker.device.graphs import DRAWN, GREEDY, MIXED, GraphBucket, Graphs, Record, record_on_cuda
from quire.worker.device.runner import NOWHERE, Inputs, Runner
from quire.worker.device.staging import SampledTokens, Staging, StagingField, padded, pinned_buffers
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.randomness import uniform
from quire.worker.engine.sequence import PENDING
from quire.worker.engine.step import Step
from quire.worker.models.batch import ForwardBatch, send

# Of a row of padding, which keeps nothing: one token, and the draw that takes least. The rest is 0.
FILLERS = {"lengths": 1, "top_ps": 1}


def decode_fields(count: int) -> list[StagingField]:
    """What a decoding sequence needs in a step, and a draw."""
    types = {
        "rows": np.int64,
        "uniforms": np.float64,
        "lengths": np.int32,
        "temperatures": np.float32,
        "top_ks": np.int32,
        "top_ps": np.float32,
        "min_ps": np.float32,
    }
    return [StagingField(name, one, count) for name, one in types.items()]


def input_fields(tokens: int, sequences: int) -> list[StagingField]:
    """`Inputs`, for steps of any kind."""
    return [
        StagingField("rows", np.int64, sequences),
        StagingField("sampled", np.int64, sequences),
        StagingField("lengths", np.int32, sequences),
        StagingField("starts", np.int32, sequences + 1),
        StagingField("token_ids", np.int32, tokens),
        StagingField("positions", np.int32, tokens),
        StagingField("slots", np.int32, tokens),
    ]


class DeviceRunner(Runner):
    """Owns the model, its cache and, on the device, block tables and the last token of every running sequence.

    graph_rooms: the shapes for which CUDA graphs are captured. record: how; other than CUDA's own in tests.
    """

    looks_ahead = True

    def __init__(
        self,
        model: Any,
        limits: EngineLimits,
        rows: InputBatch,
        graph_rooms: Iterable[GraphBucket] = (),
        record: Record = record_on_cuda,
    ) -> None:
        super().__init__(model, limits, rows)
        self.device = torch.device(getattr(model.ops, "device", "cpu"))
        count, columns = limits.max_num_seqs, rows.block_tables.shape[1]
        # The row behind the last one is for padding: one token, whose key and value are not kept.
        self._tables = torch.zeros((count + 1, columns), dtype=torch.int32, device=self.device)
        self._last = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
        self._padding = count
        self._staging = Staging(decode_fields(count + 1), self.device)
        rooms = list(graph_rooms)
        most = max([limits.max_num_batched_tokens, *(room.tokens for room in rooms)])
        self._inputs_staging = Staging(input_fields(most, count), self.device)
        self._starts = torch.arange(count + 2, dtype=torch.int32, device=self.device)
        self._all = torch.arange(count + 1, dtype=torch.int64, device=self.device)
        self._drawn = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
        self._hosts = pinned_buffers(count + 1, torch.int32, self.device)
        # Where graphs leave their logits: outside of their pool, in which another graph may overwrite everything.
        widest = max((room.sequences for room in rooms if room.kind == MIXED), default=0)
        self._logits = torch.zeros((widest, model.vocab_size), dtype=torch.float32, device=self.device)
        self.graphs = Graphs(rooms, self._stage_nothing, self._launch, record)
        rows.changes = []

    # --- steps that only decode ---------------------------------------------------------------------------------------

    def decode(self, step: Step) -> SampledTokens | None:
        """Launch a step of ordinary decodes, its drawing included; None if it has anything else in it."""
        if step.chunks or not step.decodes:
            return None
        self.move_blocks(step)
        self._send_tables()
        at = step.decodes.rows
        self._send_last(at)
        is_drawn = bool(self.rows.is_drawn[at].any())
        count = len(at)
        if found := self.graphs.find(DRAWN if is_drawn else GREEDY, count, count):
            room, graph = found
            self._staging.send(self._columns(at, room.sequences, is_drawn))
            with torch.inference_mode():
                graph.replay()
        else:
            self._staging.send(self._columns(at, count, is_drawn))
            with torch.inference_mode():
                self._decode(count, is_drawn)
        return self._fetch(count)

    def _columns(self, at: np.ndarray, width: int, is_drawn: bool) -> dict[str, np.ndarray]:
        columns = {"rows": at, "lengths": self.rows.lengths[at]}
        if is_drawn:
            columns |= self._draw_columns(at)
        if width == len(at):
            return columns
        fillers = FILLERS | {"rows": self._padding}
        return {name: padded(column, width, fillers.get(name, 0)) for name, column in columns.items()}

    def _draw_columns(self, at: np.ndarray) -> dict[str, np.ndarray]:
        rows = self.rows
        return {
            "uniforms": uniform(rows.seeds[at], rows.choices[at], rows.lengths[at].astype(np.uint64)),
            "temperatures": rows.temperatures[at],
            "top_ks": rows.top_ks[at],
            "top_ps": rows.top_ps[at],
            "min_ps": rows.min_ps[at],
        }

    def _decode(self, count: int, is_drawn: bool) -> None:
        """A step on the device from what lies there: one token for each of the first `count` staged rows."""
        staged = self._staging.on_device
        rows, lengths = staged["rows"][:count], staged["lengths"][:count]
        size = self.limits.block_size
        tables, positions = self._tables[rows], lengths - 1
        blocks = tables.gather(1, (positions // size).long()[:, None])[:, 0]
        slots = (blocks * size + positions % size).masked_fill(rows == self._padding, NOWHERE)
        batch = ForwardBatch(
            token_ids=self._last[rows],
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            seq_lens=lengths,
            query_start_loc=self._starts[: count + 1],
            logits_rows=self._all[:count],
        )
        logits = self.model.forward(batch, self.kv_cache)
        self._keep(rows, self._pick(logits, is_drawn))

    def _pick(self, logits: torch.Tensor, is_drawn: bool) -> torch.Tensor:
        """One token for each row of logits: the likeliest, or drawn by what is staged."""
        ops, count = self.model.ops, len(logits)
        greedy: torch.Tensor = ops.argmax(logits)
        if not is_drawn:
            return greedy
        temperatures, top_ks, top_ps, min_ps, uniforms = (
            self._staging.on_device[name][:count] for name in ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
        )
        by_chance = temperatures > 0
        drawn = ops.sample(logits, temperatures.masked_fill(~by_chance, 1.0), top_ks, top_ps, min_ps, uniforms)
        return torch.where(by_chance, drawn, greedy)

    def _keep(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self._last.index_copy_(0, rows, tokens)
        self._drawn[: len(tokens)].copy_(tokens)

    def _fetch(self, count: int) -> SampledTokens:
        host, copied = self._hosts[0]
        self._hosts.rotate(-1)
        host[:count].copy_(self._drawn[:count], non_blocking=True)
        copied.set()
        return SampledTokens(host, count, copied)

    # --- any step -----------------------------------------------------------------------------------------------------

    def execute(self, step: Step) -> torch.Tensor | None:
        """Compute a step; the logits of its sampled rows, decodes first: [R, vocab] float32, on the device, until the
        next step. None if there is no device memory for so many tokens: then its blocks are moved, and no more."""
        self.move_blocks(step)
        self._send_tables()
        inputs = self._inputs(step)
        tokens, sequences, sampled = len(inputs.token_ids), len(inputs.rows), len(inputs.sampled)
        if found := self.graphs.find(MIXED, tokens, sequences):
            room, graph = found
            self._stage(inputs, room)
            with torch.inference_mode():
                graph.replay()
            return self._logits[:sampled]
        try:
            return self._forward(inputs)
        except torch.OutOfMemoryError:
            if step.num_tokens <= self.limits.max_num_seqs:
                raise
        torch.cuda.empty_cache()  # not where the error is caught: its traceback still holds activations
        return None

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        tokens, sequences = len(inputs.token_ids), len(inputs.rows)
        self._stage(inputs, GraphBucket(MIXED, tokens, sequences))
        with torch.inference_mode():
            return self._mixed(tokens, sequences, len(inputs.sampled))

    def _stage(self, inputs: Inputs, room: GraphBucket) -> None:
        """Send the inputs of a step. Beyond them come tokens whose keys and values are not kept, of no sequence, and
        sequences without tokens."""
        tokens, sequences = room.tokens, room.sequences
        self._inputs_staging.send(
            {
                "rows": padded(inputs.rows, sequences, self._padding),
                "sampled": padded(inputs.sampled, sequences, 0),
                "lengths": padded(inputs.lengths, sequences, 0),
                "starts": padded(inputs.starts, sequences + 1, inputs.starts[-1]),
                "token_ids": padded(inputs.token_ids, tokens, 0),
                "positions": padded(inputs.positions, tokens, 0),
                "slots": padded(inputs.slots, tokens, NOWHERE),
            }
        )

    def _mixed(self, tokens: int, sequences: int, sampled: int) -> torch.Tensor:
        """Logits of a step on the device from what is staged there: so many of each."""
        staged = self._inputs_staging.on_device
        rows, token_ids = staged["rows"][:sequences], staged["token_ids"][:tokens]
        # Decodes come first, one token each, so theirs stand at the places of their rows.
        first = token_ids[:sequences]
        known = torch.where(first == PENDING, self._last[rows], first)
        batch = ForwardBatch(
            token_ids=torch.cat([known, token_ids[sequences:]]),
            positions=staged["positions"][:tokens],
            slot_mapping=staged["slots"][:tokens],
            block_tables=self._tables[rows],
            seq_lens=staged["lengths"][:sequences],
            query_start_loc=staged["starts"][: sequences + 1],
            logits_rows=staged["sampled"][:sampled],
        )
        logits: torch.Tensor = self.model.forward(batch, self.kv_cache)
        return logits

    def draw(self, logits: torch.Tensor, at: np.ndarray) -> SampledTokens:
        """One token for each row of logits, by the parameters of the rows `at`; they stay on the device too."""
        is_drawn = bool(self.rows.is_drawn[at].any())
        self._staging.send({"rows": at} | (self._draw_columns(at) if is_drawn else {}))
        with torch.inference_mode():
            self._keep(self._staging.on_device["rows"][: len(at)], self._pick(logits, is_drawn))
        return self._fetch(len(at))

    # --- graphs -------------------------------------------------------------------------------------------------------

    def capture_next(self) -> bool:
        return self.graphs.capture_next()

    def check(self) -> None:
        super().check()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _launch(self, room: GraphBucket) -> None:
        """What the graph of a room holds."""
        if room.kind == MIXED:
            logits = self._mixed(room.tokens, room.sequences, room.sequences)
            self._logits[: room.sequences].copy_(logits)
        else:
            self._decode(room.sequences, room.kind == DRAWN)

    def _stage_nothing(self, room: GraphBucket) -> None:
        """Stage a step of padding, which leaves no trace."""
        nothing = np.zeros(0, dtype=np.int32)
        if room.kind == MIXED:
            starts = np.zeros(1, dtype=np.int32)
            self._stage(Inputs(nothing, nothing, nothing, nothing.astype(np.int64), nothing, starts, nothing), room)
        else:
            self._staging.send(self._columns(nothing.astype(np.int64), room.sequences, room.kind == DRAWN))

    # --- what the device must know ------------------------------------------------------------------------------------

    def _send_tables(self) -> None:
        """Bring the block tables on the device up to date."""
        changes = self.rows.changes
        if not changes:
            return
        columns = self._tables.shape[1]
        cells = np.unique(np.concatenate([rows * columns + at for rows, at in changes]))
        changes.clear()
        values = self.rows.block_tables.reshape(-1)[cells]
        self._tables.view(-1).index_copy_(0, self._sent(cells), self._sent(values))

    def _send_last(self, at: np.ndarray) -> None:
        """Last tokens that the host knows and the device may not."""
        last = self.rows.last_tokens
        known = at[last[at] != PENDING]
        if len(known):
            self._last.index_copy_(0, self._sent(known), self._sent(last[known]))

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        return send(torch.from_numpy(values), self.device)
