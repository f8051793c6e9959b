"""The trial of a model that Transformers computes: with paged attention it must give the same logits as without."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import PagedModel

BLOCK_SIZE = 16
# Lengths of two texts, each in a block of its own.
LENGTHS = (11, 6)
# Tokens in an artificial cache. Models that scale scores by the length of the context do so from a few thousand tokens.
LONG = 1 << 20


class TrialChunk(NamedTuple):
    """Tokens of a text that follow those already in its block."""

    block: int
    first: int
    token_ids: torch.Tensor


def texts(vocab_size: int, max_model_len: int) -> list[torch.Tensor]:
    """Return two texts of arbitrary tokens, the vocabulary's last among them, of at most `max_model_len` tokens."""
    tokens = (torch.arange(sum(LENGTHS), dtype=torch.int32) * 7 + 3) % vocab_size
    tokens[0] = vocab_size - 1
    return [text[:max_model_len] for text in torch.split(tokens, list(LENGTHS))]


def by_transformers(model: Any, both: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits of the last token of each text [2, V], each computed alone with the attention of the model."""
    # Transformers chooses the positions here; the positions that steps pass must have the same effect.
    with torch.inference_mode():
        rows = [logits(model, ids.to(model.device), None, _last(ids, model.device)) for ids in both]
    return torch.cat(rows)


def at_the_end(model: Any, ids: torch.Tensor, max_model_len: int, past: Any = None) -> torch.Tensor:
    """Run a text at the last positions of a context, with or without a past: the logits of its last token [1, V]."""
    positions = torch.arange(max_model_len - len(ids), max_model_len, device=model.device)
    with torch.inference_mode():
        return logits(model, ids.to(model.device), positions, _last(ids, model.device), past)


def long_past() -> Any:
    """Return a cache of Transformers that claims a long past, and returns keys and values as they are given."""
    from transformers import DynamicCache

    class LongPast(DynamicCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            return LONG

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
            return key_states, value_states

    return LongPast()


def _last(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.tensor([len(ids) - 1], device=device)


def over_pages(model: PagedModel, both: list[torch.Tensor]) -> torch.Tensor:
    """Compute the logits of the last token of both texts [2, V], by paged attention in three steps.

    Step 1 has half of the first text, step 2 its rest without the last token and the second text, step 3 that token.
    """
    first, second = both
    half = len(first) // 2
    steps = [
        [TrialChunk(0, 0, first[:half])],
        [TrialChunk(0, half, first[half:-1]), TrialChunk(1, 0, second)],
        [TrialChunk(0, len(first) - 1, first[-1:])],
    ]
    return _in_steps(model, both, steps)


def one_by_one(model: PagedModel, both: list[torch.Tensor]) -> torch.Tensor:
    """Compute the logits of the last token of both texts [2, V], by paged attention with one step per text."""
    return _in_steps(model, both, [[TrialChunk(block, 0, ids)] for block, ids in enumerate(both)])


def _in_steps(model: PagedModel, both: list[torch.Tensor], steps: list[list[TrialChunk]]) -> torch.Tensor:
    cache = model.alloc_kv_cache(len(both), BLOCK_SIZE)
    if model.state_bytes:
        cache = model.alloc_states(cache, len(both))
    last: dict[int, torch.Tensor] = {}
    for step in steps:
        chunks = [chunk for chunk in step if len(chunk.token_ids)]
        if chunks:
            with torch.inference_mode():
                rows = model.forward(batch(chunks).to(model.ops.device), cache)
            last |= {chunk.block: row for chunk, row in zip(chunks, rows, strict=True)}
    return torch.stack([last[0], last[1]])


def batch(chunks: list[TrialChunk]) -> ForwardBatch:
    """Return a step of these chunks, with logits for the last token of each."""
    lengths = torch.tensor([len(chunk.token_ids) for chunk in chunks])
    positions = [chunk.first + torch.arange(len(chunk.token_ids), dtype=torch.int32) for chunk in chunks]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ForwardBatch(
        token_ids=torch.cat([chunk.token_ids for chunk in chunks]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat([chunk.block * BLOCK_SIZE + at for chunk, at in zip(chunks, positions, strict=True)]),
        block_tables=torch.tensor([[chunk.block] for chunk in chunks], dtype=torch.int32),
        seq_lens=torch.tensor([chunk.first + len(chunk.token_ids) for chunk in chunks], dtype=torch.int32),
        query_start_loc=starts.int(),
        logits_rows=starts[1:] - 1,
        state_slots=torch.tensor([chunk.block for chunk in chunks]),
    )


def takes_cache_params(model: Any) -> bool:
    """Return True for models of recurrent layers alone, such as Mamba, which have no positions."""
    return "cache_params" in inspect.signature(model.forward).parameters


def logits(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor, past: Any = None
) -> torch.Tensor:
    """Call a model of Transformers: token_ids [T], positions [T] or [4, T], rows int64 [R] of T -> float32 [R, V]."""
    given: dict[str, Any]
    if takes_cache_params(model):
        given = {"cache_params": past}
    else:
        given = {"past_key_values": past, "position_ids": None if positions is None else positions.long().unsqueeze(-2)}
    ids = token_ids.long()[None]
    out = model(input_ids=ids, use_cache=False, return_dict=True, logits_to_keep=rows, **given)
    of_rows: torch.Tensor = out.logits[0].float().contiguous()
    return of_rows
