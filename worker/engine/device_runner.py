"""Running steps on a device that works on its own while the host prepares the next step.

The tokens of a step stay on the device and are the inputs of the next one: the host launches step N + 1 without having
seen what step N drew. The block tables are on the device too, and only what changed is sent. A step that only decodes
is one small copy to the device and, on CUDA, one graph; its tokens come back by a copy that nobody waits for until they
are needed.

Everything is in the order of one stream. So a block may be given to another sequence as soon as the last step that uses
it is launched, before it has run. And nothing here may wait for the device: what is sent goes through pinned memory.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from worker.engine.limits import EngineLimits
from worker.engine.randomness import uniform
from worker.engine.rows import Rows
from worker.engine.runner import NOWHERE, Runner
from worker.engine.sequence import PENDING
from worker.engine.step import Active, Step
from worker.models.batch import ForwardBatch, send

log = logging.getLogger(__name__)

# Steps whose inputs or outputs may be under way at once: the one before is settled when the next has been launched.
IN_FLIGHT = 3


class _Field(NamedTuple):
    name: str
    dtype: torch.dtype
    numpy: Any


# What a decoding sequence needs in a step, the widest types first so that all are aligned.
FIELDS = (
    _Field("rows", torch.int64, np.int64),
    _Field("uniforms", torch.float64, np.float64),
    _Field("lengths", torch.int32, np.int32),
    _Field("temperatures", torch.float32, np.float32),
    _Field("top_ks", torch.int32, np.int32),
    _Field("top_ps", torch.float32, np.float32),
    _Field("min_ps", torch.float32, np.float32),
)


class Staging:
    """One column per field in one buffer: filled on the host, pinned, and copied to the device in one go."""

    def __init__(self, count: int, device: torch.device) -> None:
        sizes = [field.dtype.itemsize * count for field in FIELDS]
        pinned = device.type == "cuda"
        self.device_bytes = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._hosts = deque(torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned) for _ in range(IN_FLIGHT))
        starts = np.cumsum([0, *sizes])
        self._spans = list(zip(FIELDS, starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        self.on_device = {field.name: self.device_bytes[a:b].view(field.dtype) for field, a, b in self._spans}

    def send(self, columns: dict[str, np.ndarray]) -> None:
        """Copy columns to the device, each [R] or shorter. Those that are not named keep what they had."""
        host = self._hosts[0]
        self._hosts.rotate(-1)
        whole = host.numpy()
        for field, start, end in self._spans:
            if (column := columns.get(field.name)) is not None:
                whole[start:end].view(field.numpy)[: len(column)] = column
        self.device_bytes.copy_(host, non_blocking=True)


class Tokens:
    """Tokens that were drawn on the device, on their way to the host."""

    def __init__(self, host: torch.Tensor, count: int, event: Any) -> None:
        self._host, self._count, self._event = host, count, event

    def wait(self) -> np.ndarray:
        """int32 [R], once the device has drawn them."""
        if self._event is not None:
            self._event.synchronize()
        tokens: np.ndarray = self._host[: self._count].numpy().copy()
        return tokens


class DeviceRunner(Runner):
    """Owns the model, its cache and, on the device, block tables and the last token of every running sequence.

    graph_sizes: numbers of sequences for which CUDA graphs are captured; a step is padded to the next of them.
    """

    looks_ahead = True

    def __init__(self, model: Any, limits: EngineLimits, rows: Rows, graph_sizes: tuple[int, ...] = ()) -> None:
        super().__init__(model, limits, rows)
        self.device = torch.device(getattr(model.ops, "device", "cpu"))
        count, columns = limits.max_num_seqs, rows.block_tables.shape[1]
        # The row behind the last one is for padding: one token, whose key and value are not kept.
        self._tables = torch.zeros((count + 1, columns), dtype=torch.int32, device=self.device)
        self._last = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
        self._padding = count
        self._staging = Staging(count + 1, self.device)
        self._starts = torch.arange(count + 2, dtype=torch.int32, device=self.device)
        self._all = torch.arange(count + 1, dtype=torch.int64, device=self.device)
        self._drawn = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self._hosts = deque(torch.zeros(count + 1, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT))
        self._graph_sizes = tuple(sorted(graph_sizes))
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._pool: Any = None
        rows.changes = []

    # --- steps that only decode ---------------------------------------------------------------------------------------

    def decode(self, step: Step) -> Tokens | None:
        """Launch a step of ordinary decodes, its drawing included; None if it has anything else in it."""
        if step.chunks or not step.decodes:
            return None
        self.move_blocks(step)
        self._send_tables()
        at = step.decodes.rows
        self._send_last(at)
        is_drawn = bool(self.rows.is_drawn[at].any())
        count = len(at)
        size = next((size for size in self._graph_sizes if size >= count), 0)
        # Before anything is staged: a capture stages rows of its own.
        graph = self._graph(size, is_drawn) if size else None
        self._staging.send(self._columns(at, size or count, is_drawn))
        if graph is not None:
            graph.replay()
        else:
            with torch.inference_mode():
                self._decode(size or count, is_drawn)
        return self._fetch(count)

    def _columns(self, at: np.ndarray, width: int, is_drawn: bool) -> dict[str, np.ndarray]:
        rows = self.rows
        columns = {"rows": at, "lengths": rows.lengths[at]}
        if is_drawn:
            columns |= self._draw_columns(at)
        padding = width - len(at)
        if padding:
            filler = {"rows": self._padding, "lengths": 1}
            columns = {
                name: np.concatenate([column, np.full(padding, filler.get(name, 0), dtype=column.dtype)])
                for name, column in columns.items()
            }
        return columns

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

    def _fetch(self, count: int) -> Tokens:
        host = self._hosts[0]
        self._hosts.rotate(-1)
        host[:count].copy_(self._drawn[:count], non_blocking=True)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Tokens(host, count, event)

    # --- any step -----------------------------------------------------------------------------------------------------

    def execute(self, step: Step) -> torch.Tensor:
        """Compute a step; the logits of its sampled rows, decodes first: [R, vocab] float32, on the device."""
        self.move_blocks(step)
        self._send_tables()  # also where no graph needs them: what changed must not pile up
        self._send_last(step.decodes.rows)
        try:
            return self._forward(step)
        except torch.OutOfMemoryError:
            if len(step.chunks) + bool(step.decodes) < 2:
                raise
        # Activations are what a step needs beside weights and cache: in parts it needs less.
        log.warning("out of device memory in a step of %d tokens: computing it in parts", step.num_tokens)
        torch.cuda.empty_cache()
        parts = [Step(step.decodes)] if step.decodes else []
        parts += [Step(Active.of([]), chunks=[chunk]) for chunk in step.chunks]
        return torch.cat([self._forward(part) for part in parts])

    def _forward(self, step: Step) -> torch.Tensor:
        batch = self._build(step).to(self.device)
        if step.decodes:
            rows = self._sent(step.decodes.rows)
            batch.token_ids[: len(rows)] = self._last[rows]
        with torch.inference_mode():
            logits: torch.Tensor = self.model.forward(batch, self.kv_cache)
        return logits

    def draw(self, logits: torch.Tensor, at: np.ndarray) -> Tokens:
        """One token for each row of logits, by the parameters of the rows `at`; they stay on the device too."""
        is_drawn = bool(self.rows.is_drawn[at].any())
        self._staging.send({"rows": at} | (self._draw_columns(at) if is_drawn else {}))
        with torch.inference_mode():
            self._keep(self._staging.on_device["rows"][: len(at)], self._pick(logits, is_drawn))
        return self._fetch(len(at))

    # --- graphs -------------------------------------------------------------------------------------------------------

    def _graph(self, size: int, is_drawn: bool) -> Any:
        """The graph of a step that only decodes, captured when it is first needed; None if there is no memory for it.
        CUDA only."""
        if (graph := self._graphs.get((size, is_drawn))) is not None:
            return graph
        try:
            graph = self._graphs[size, is_drawn] = self._capture(size, is_drawn)
        except torch.OutOfMemoryError:
            kept = tuple(
                one for one in self._graph_sizes if (one, True) in self._graphs and (one, False) in self._graphs
            )
            log.warning("out of device memory for CUDA graphs: those for %s sequences stay", kept or "no number of")
            self._graph_sizes = kept
            torch.cuda.empty_cache()
        return graph

    def capture_next(self) -> bool:
        """Capture one more graph, the largest first; False if all are there. For the time between requests."""
        for size, is_drawn in ((size, is_drawn) for size in reversed(self._graph_sizes) for is_drawn in (True, False)):
            if (size, is_drawn) not in self._graphs:
                self._graph(size, is_drawn)
                return True
        return False

    def _capture(self, size: int, is_drawn: bool) -> Any:
        # Once without a graph, so that all kernels are compiled and loaded; on rows of padding, which leave no trace.
        # On the stream of all steps: for another one cuBLAS and the allocator would keep memory that nobody counts.
        self._staging.send({"rows": np.full(size, self._padding), "lengths": np.ones(size, dtype=np.int32)})
        with torch.inference_mode():
            self._decode(size, is_drawn)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            self._decode(size, is_drawn)
        self._pool = self._pool or graph.pool()
        return graph

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
