"""Logits to tokens for a whole mixed batch: penalties, bans, then greedy or a draw, each row by its own parameters.

Order and definitions: repetition penalty over prompt and output (Hugging Face), presence and frequency penalty over the
output (OpenAI), `min_tokens` by banning the end tokens, then temperature, top-k, top-p, min-p as `kernels` defines
them. A row's result depends on its own logits and its own random number only.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from worker.engine.randomness import uniform
from worker.engine.sequence import Sequence

NEVER = float("-inf")


class Sampler:
    """Draws with the operations of a backend (`argmax`, `sample`)."""

    def __init__(self, ops: Any, eos_token_ids: Iterable[int]) -> None:
        self._ops = ops
        self._eos = sorted(eos_token_ids)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
        """One token for each sequence.

        logits: [R, V] float32, row r for sequences[r]; changed in place where penalties or bans apply.
        """
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
        drawn = [row for row, sequence in enumerate(sequences) if sequence.group.sampling.temperature > 0]
        if not drawn:
            return self._ops.argmax(logits).tolist()
        if len(drawn) == len(sequences):
            return self._draw(logits, sequences)
        tokens: list[int] = self._ops.argmax(logits).tolist()
        chosen = self._draw(logits[drawn], [sequences[row] for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
        return tokens

    def _draw(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
        params = [sequence.group.sampling for sequence in sequences]
        numbers = [uniform(p.seed, s.choice, len(s.token_ids)) for p, s in zip(params, sequences, strict=True)]
        drawn = self._ops.sample(
            logits,
            torch.tensor([p.temperature for p in params], dtype=torch.float32),
            torch.tensor([p.top_k for p in params], dtype=torch.int32),
            torch.tensor([p.top_p for p in params], dtype=torch.float32),
            torch.tensor([p.min_p for p in params], dtype=torch.float32),
            torch.tensor(numbers, dtype=torch.float64),
        )
        tokens: list[int] = drawn.tolist()
        return tokens

    def _adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
        """Penalties and bans of one row. logits: [V] float32, changed in place."""
        params = sequence.group.sampling
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.token_ids)), dtype=torch.int64, device=logits.device)
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        counts = sequence.output_counts
        if counts and (params.presence_penalty or params.frequency_penalty):
            drawn = torch.tensor(list(counts.keys()), dtype=torch.int64, device=logits.device)
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
            logits[drawn] -= params.presence_penalty + params.frequency_penalty * times
        if sequence.num_output_tokens < params.min_tokens and self._eos and not params.ignore_eos:
            logits[self._eos] = NEVER
