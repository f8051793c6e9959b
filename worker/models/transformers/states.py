"""Recurrent states of models that Transformers computes: short convolutions, Mamba, delta nets, linear attention.

Transformers passes a cache to each layer with a state, and the layer asks it for its states and gives it new ones. The
caches here take the place of that cache. `StateProbe` records, during a trial run, which modules ask and the shapes of
their states. `StateStep` holds the states of a step in slots of a `StatePool`.

A module with states must see the tokens of one sequence at a time, while all other layers get the tokens of all
sequences as one row. So each such module is wrapped: chunks of prompts are computed one after the other, and sequences
that decode one token as one batch. A chunk is split where a snapshot of the state is wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.transformers import trial
from quire.worker.models.transformers.state_pool import StateKey, StateLayout, StatePool

CONV, RECURRENT = "conv", "recurrent"


class TransformersCache:
    """The interface of a cache of Transformers, for models whose attention ignores it."""

    is_compileable = False
    layers: tuple[Any, ...] = ()

    def __init__(self, length: int = 0) -> None:
        """length: the number of tokens that the cache claims to hold."""
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return keys and values as they are given: the paged KV cache keeps them."""
        return key_states, value_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class StateProbe(TransformersCache):
    """Records the states of a model while a text runs, and the modules that keep them. Every state is a new one."""

    def __init__(self, model: nn.Module, length: int = 0) -> None:
        super().__init__(length)
        self.modules: dict[nn.Module, None] = {}  # in the order of their calls
        self.owners: dict[StateKey, nn.Module] = {}
        self.shapes: dict[StateKey, tuple[tuple[int, ...], torch.dtype]] = {}
        self._model = model
        self._calls: list[nn.Module] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which module is running, so that a request for a state can be assigned to it."""
        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(lambda called, _: self._calls.append(called)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self) -> None:
        self._calls.pop()

    def _record(self, key: StateKey, shape: torch.Size, dtype: torch.dtype) -> None:
        self._called()
        self.shapes.setdefault(key, (tuple(shape), dtype))
        if self._calls:
            self.owners.setdefault(key, self._calls[-1])

    def _called(self) -> None:
        if self._calls:
            self.modules.setdefault(self._calls[-1])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._called()

    get_recurrent_state = get_conv_state
    get_linear_cache = get_conv_state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        width = conv_kernel_size or new.shape[-1]
        self._record(StateKey(layer_idx, CONV, state_idx), torch.Size([*new.shape[1:-1], width]), new.dtype)
        return _at_least(new, width)

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self._record(StateKey(layer_idx, RECURRENT, state_idx), new.shape[1:], new.dtype)
        return new

    def set_linear_cache(self, layer_idx: int, new: torch.Tensor) -> None:
        self.update_recurrent_state(new, layer_idx)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens first .. end - 1 of the batch, all of one sequence."""

    first: int
    end: int
    slot: int
    is_fresh: bool  # the sequence begins here, so its slot has no state yet
    snapshot: int | None  # slot to copy the state to, after these tokens

    def by_token(self) -> list[Segment]:
        """Return this segment as one per token, unless it begins a sequence."""
        if self.is_fresh:
            return [self]
        tokens = [Segment(at, at + 1, self.slot, False, None) for at in range(self.first, self.end)]
        return [*tokens[:-1], replace(tokens[-1], snapshot=self.snapshot)]


class StateStep(TransformersCache):
    """The states of one step."""

    def __init__(self, batch: ForwardBatch, pool: StatePool, one_by_one: bool = False) -> None:
        """one_by_one: the modules continue a state only for a single token, as those of Mamba-1 do."""
        super().__init__()
        assert batch.state_slots is not None, "the batch names no slots of states"
        self._pool = pool
        self._num_tokens = len(batch.token_ids)
        segments = _segments(batch)
        if one_by_one:
            segments = [part for segment in segments for part in segment.by_token()]
        # The segments of one sequence depend on each other, so a sequence with several does not decode.
        counts = Counter(segment.slot for segment in segments)
        continued = [segment for segment in segments if counts[segment.slot] == 1 and not segment.is_fresh]
        decodes = {segment for segment in continued if segment.end - segment.first == 1}
        self._decodes = [segment for segment in segments if segment in decodes]
        self._chunks = [segment for segment in segments if segment not in decodes]
        device = batch.token_ids.device
        self._decode_tokens = torch.tensor(
            [segment.first for segment in self._decodes], dtype=torch.int64, device=device
        )
        self._decode_slots = torch.tensor([segment.slot for segment in self._decodes], dtype=torch.int64, device=device)
        # States of the segment that is being computed.
        self._bound: dict[StateKey, torch.Tensor] = {}
        self._segment: Segment | None = None
        self._has_previous = False

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module for the tokens of each sequence. Returns the results as if for all tokens at once."""
        merged: Any = None
        if self._decodes:
            self._bind(None)
            output = forward(*self._pick(args), **self._pick(kwargs))
            for key, states in self._bound.items():
                self._pool.states[key].index_copy_(0, self._decode_slots, states)
            for segment in self._decodes:
                self._keep(segment)
            merged = self._merge(merged, output, None)
        for segment in self._chunks:
            self._bind(segment)
            output = forward(*self._slice(args, segment), **self._slice(kwargs, segment))
            self._keep(segment)
            merged = self._merge(merged, output, segment)
        return merged

    def _bind(self, segment: Segment | None) -> None:
        self._bound, self._segment = {}, segment
        self._has_previous = segment is None or not segment.is_fresh

    def _keep(self, segment: Segment) -> None:
        if segment.snapshot is not None:
            self._pool.copy_states(set(self._bound), segment.slot, segment.snapshot)

    def _state(self, key: StateKey) -> torch.Tensor:
        """Return the state of the tokens being computed: [1, ...], or [B, ...] for decodes."""
        if key not in self._bound:
            states, segment = self._pool.states[key], self._segment
            state = states.index_select(0, self._decode_slots) if segment is None else states[segment.slot][None]
            self._bound[key] = state
        return self._bound[key]

    # --- the interface that layers call -------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state(StateKey(layer_idx, CONV, state_idx)) if self._has_previous else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state(StateKey(layer_idx, RECURRENT, state_idx)) if self._has_previous else None

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._has_previous

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Append inputs to the last ones. Returns all of them, and keeps as many as the state holds."""
        state = self._state(StateKey(layer_idx, CONV, state_idx))
        width = state.shape[-1]
        full = torch.cat([state, new], dim=-1) if self._has_previous else _at_least(new, width)
        state.copy_(full[..., -width:])
        return full

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return self._state(StateKey(layer_idx, RECURRENT, state_idx)).copy_(new)

    def set_linear_cache(self, layer_idx: int, new: torch.Tensor) -> None:
        self.update_recurrent_state(new, layer_idx)

    # --- tokens of arguments and results ------------------------------------------------------------------------------

    def _slice(self, given: Any, segment: Segment) -> Any:
        return self._map(given, lambda part: part[:, segment.first : segment.end])

    def _pick(self, given: Any) -> Any:
        return self._map(given, lambda part: part[0].index_select(0, self._decode_tokens).unsqueeze(1))

    def _map(self, given: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Apply a function to all tensors [1, T, ...] in arguments."""
        if isinstance(given, torch.Tensor):
            is_of_tokens = given.dim() > 1 and given.shape[:2] == (1, self._num_tokens)
            return change(given) if is_of_tokens else given
        if isinstance(given, dict):
            return {name: self._map(part, change) for name, part in given.items()}
        if isinstance(given, tuple):
            return tuple(self._map(part, change) for part in given)
        return given

    def _merge(self, merged: Any, output: Any, segment: Segment | None) -> Any:
        """Write the result for some tokens into the result for all. Other results than those of tokens are dropped."""
        if isinstance(output, tuple):
            before = merged if merged is not None else (None,) * len(output)
            return tuple(self._merge(whole, part, segment) for whole, part in zip(before, output, strict=True))
        if not isinstance(output, torch.Tensor):
            return None
        expected = (len(self._decodes), 1) if segment is None else (1, segment.end - segment.first)
        if output.shape[:2] != expected:
            return merged
        if segment is None and not self._chunks:
            return output.transpose(0, 1)
        if merged is None:
            merged = output.new_empty((1, self._num_tokens, *output.shape[2:]))
        if segment is None:
            merged[0].index_copy_(0, self._decode_tokens, output[:, 0])
        else:
            merged[:, segment.first : segment.end] = output
        return merged


_running: ContextVar[StateStep] = ContextVar("running_states")


@contextmanager
def running(states: StateStep) -> Iterator[None]:
    """Use the states of this step in every call of a wrapped module inside the context."""
    token = _running.set(states)
    try:
        yield
    finally:
        _running.reset(token)


def wrap(module: Any) -> None:
    """Make a module compute the tokens of one sequence at a time, with the states of the running step."""
    forward = module.forward

    def by_sequence(*args: Any, **kwargs: Any) -> Any:
        return _running.get().run(forward, args, kwargs)

    module.forward = by_sequence


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """The states of a model, and the modules that keep them."""

    layout: StateLayout
    modules: tuple[nn.Module, ...]
    # The first recurrent state of each class of modules.
    examples: tuple[StateKey, ...]

    @classmethod
    def of(cls, probe: StateProbe) -> Self | None:
        """Return the states that a probe has recorded; None if no layer keeps one."""
        examples: dict[type, StateKey] = {}
        for key, module in probe.owners.items():
            if key.kind == RECURRENT:
                examples.setdefault(type(module), key)
        layout = StateLayout(probe.shapes)
        return cls(layout, tuple(probe.modules), tuple(examples.values())) if probe.shapes else None

    def continue_chunks(self, model: PagedModel) -> bool:
        """Return whether the wrapped modules of a model continue a state with several tokens at once.

        Some do so only with a single token, and otherwise begin anew without an error: two different states then
        become the same state, and give the same logits to the last bit.
        """
        chunk = trial.batch([trial.TrialChunk(0, 1, torch.arange(3, dtype=torch.int32) % model.vocab_size)])
        for key in self.examples:
            states, logits = [], []
            for value in (0.0, 1.0):
                cache = model.alloc_states(model.alloc_kv_cache(1, trial.BLOCK_SIZE), 1)
                assert isinstance(cache.states, StatePool)
                cache.states.states[key].fill_(value)
                with torch.inference_mode():
                    logits.append(model.forward(chunk, cache))
                states.append(cache.states.states[key])
            if torch.equal(*states) and torch.equal(*logits):
                return False
        return True


def _segments(batch: ForwardBatch) -> list[Segment]:
    assert batch.state_slots is not None
    starts, slots = batch.query_start_loc.tolist(), batch.state_slots.tolist()
    snapshots: dict[int, list[tuple[int, int]]] = {}
    for sequence, count, slot in [] if batch.snapshots is None else batch.snapshots.tolist():
        snapshots.setdefault(sequence, []).append((count, slot))
    lengths = batch.seq_lens.tolist()
    segments = []
    for index, (first, end) in enumerate(pairwise(starts)):
        at, is_fresh = first, lengths[index] == end - first
        cuts: list[tuple[int, int | None]] = [*sorted(snapshots.get(index, ()))]
        if not cuts or cuts[-1][0] < end - first:
            cuts.append((end - first, None))
        for count, slot in cuts:
            segments.append(Segment(at, first + count, slots[index], is_fresh and at == first, slot))
            at = first + count
    return segments


def _at_least(new: torch.Tensor, width: int) -> torch.Tensor:
    """Pad inputs of a convolution on the left with zeros, to at least `width`."""
    return F.pad(new, (width - new.shape[-1], 0)) if new.shape[-1] < width else new
