"""The trial of a model that Transformers computes: over pages it must say what it says without them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quire.worker.models.batch import ForwardBatch
from quire.worker.models.paged import PagedModel

BLOCK_SIZE = 16
# Of two texts, each in a block of its own.
LENGTHS = (11, 6)
# Tokens of a past: scores that are scaled by the length of a context are so from some thousands on.
LONG = 1 << 20


class TrialChunk(NamedTuple):
    """Tokens of a text, behind those that are in its block already."""

    block: int
    first: int
    token_ids: torch.Tensor


def texts(vocab_size: int, max_model_len: int) -> list[torch.Tensor]:
    """Two texts of arbitrary tokens, the last of the vocabulary among them, or shorter ones where contexts are."""
    tokens = (torch.arange(sum(LENGTHS), dtype=torch.int32) * 7 + 3) % vocab_size
    tokens[0] = vocab_size - 1
    return [text[:max_model_len] for text in tokens.split(LENGTHS)]


def by_transformers(model: Any, both: list[torch.Tensor]) -> torch.Tensor:
    """The logits of the last token of each, computed alone and with the attention that the model has now: [2, V]."""
    # Without positions: Transformers gives them itself, and those that we give in each step must be the same.
    with torch.inference_mode():
        rows = [logits(model, ids.to(model.device), None, _last(ids, model.device)) for ids in both]
    return torch.cat(rows)


def at_the_end(model: Any, ids: torch.Tensor, max_model_len: int, past: Any = None) -> torch.Tensor:
    """Run a text at the last positions that there are, behind a past or none: the logits of its last token [1, V]."""
    positions = torch.arange(max_model_len - len(ids), max_model_len, device=model.device)
    with torch.inference_mode():
        return logits(model, ids.to(model.device), positions, _last(ids, model.device), past)


def long_past() -> Any:
    """A cache of Transformers that has seen more tokens than any context has, and gives back what it is given."""
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
    """The same in three steps: the beginning of the first; more of it beside the second; its last token."""
    first, second = both
    half = len(first) // 2
    steps = [
        [TrialChunk(0, 0, first[:half])],
        [TrialChunk(0, half, first[half:-1]), TrialChunk(1, 0, second)],
        [TrialChunk(0, len(first) - 1, first[-1:])],
    ]
    return _in_steps(model, both, steps)


def one_by_one(model: PagedModel, both: list[torch.Tensor]) -> torch.Tensor:
    """The same with a step for each."""
    return _in_steps(model, both, [[TrialChunk(block, 0, ids)] for block, ids in enumerate(both)])


def _in_steps(model: PagedModel, both: list[torch.Tensor], steps: list[list[TrialChunk]]) -> torch.Tensor:
    cache, last = model.alloc_kv_cache(len(both), BLOCK_SIZE), {}
    for step in steps:
        pieces = [piece for piece in step if len(piece.token_ids)]
        if pieces:
            with torch.inference_mode():
                rows = model.forward(batch(pieces).to(model.ops.device), cache)
            last |= {piece.block: row for piece, row in zip(pieces, rows, strict=True)}
    return torch.stack([last[0], last[1]])


def batch(pieces: list[TrialChunk]) -> ForwardBatch:
    """A step of them, with the logits of the last token of each."""
    lengths = torch.tensor([len(piece.token_ids) for piece in pieces])
    positions = [piece.first + torch.arange(len(piece.token_ids), dtype=torch.int32) for piece in pieces]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ForwardBatch(
        token_ids=torch.cat([piece.token_ids for piece in pieces]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat([piece.block * BLOCK_SIZE + at for piece, at in zip(pieces, positions, strict=True)]),
        block_tables=torch.tensor([[piece.block] for piece in pieces], dtype=torch.int32),
        seq_lens=torch.tensor([piece.first + len(piece.token_ids) for piece in pieces], dtype=torch.int32),
        query_start_loc=starts.int(),
        logits_rows=starts[1:] - 1,
    )


def logits(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor, past: Any = None
) -> torch.Tensor:
    """Call a model of Transformers: token_ids, positions [T], rows int64 [R] of T -> float32 [R, V]."""
    out = model(
        input_ids=token_ids.long()[None],
        position_ids=None if positions is None else positions.long()[None],
        past_key_values=past,
        use_cache=False,
        return_dict=True,
        logits_to_keep=rows,
    )
    found: torch.Tensor = out.logits[0].float().contiguous()
    return found
