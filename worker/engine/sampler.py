"""Logits to tokens for a whole mixed batch: penalties, bans, then greedy or a draw, each row by its own parameters.

Order and definitions: repetition penalty over prompt and output (Hugging Face), presence and frequency penalty over the
output (OpenAI), `min_tokens` by banning the end tokens, then temperature, top-k, top-p, min-p as `kernels` defines
them. A row's result depends on its own logits and its own random number only.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from worker.engine.randomness import uniform
from worker.engine.rows import Rows
from worker.engine.sequence import Sequence

NEVER = float("-inf")


class Sampler:
    """Draws with the operations of a backend (`argmax`, `sample`), by the parameters that `rows` keeps."""

    def __init__(self, ops: Any, eos_token_ids: Iterable[int], rows: Rows) -> None:
        self._ops = ops
        self._eos = sorted(eos_token_ids)
        self._rows = rows

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, at: np.ndarray, sequences: SequenceOf[Sequence]) -> np.ndarray:
        """One token for each sequence: int32 [R].

        logits: [R, V] float32, row r for sequences[r], which lives in row at[r] of the persistent arrays; changed in
        place where penalties or bans apply. Log-probabilities that best_of asks for are added to their sequences.
        """
        rows = self._rows
        scored = np.flatnonzero(rows.is_scored[at])
        plain = logits[torch.from_numpy(scored)] if len(scored) else None  # what penalties do not touch
        for row in np.flatnonzero(rows.is_adjusted[at]):
            self.adjust(logits[row], sequences[row])
        drawn = np.flatnonzero(rows.is_drawn[at])
        if len(drawn) == len(at):
            tokens = self._draw(logits, at)
        else:
            tokens = self._ops.argmax(logits).cpu().numpy()
            if len(drawn):
                tokens[drawn] = self._draw(logits[torch.from_numpy(drawn)], at[drawn])
        if plain is not None:
            logprobs = self._ops.logprobs_of(plain, torch.from_numpy(tokens[scored]).to(logits.device))
            for row, logprob in zip(scored, logprobs.tolist(), strict=True):
                sequences[row].logprob += logprob
        return tokens

    def _draw(self, logits: torch.Tensor, at: np.ndarray) -> np.ndarray:
        rows = self._rows
        numbers = uniform(rows.seeds[at], rows.choices[at], rows.lengths[at].astype(np.uint64))
        drawn = self._ops.sample(
            logits,
            *(
                torch.from_numpy(column).to(logits.device)
                for column in (rows.temperatures[at], rows.top_ks[at], rows.top_ps[at], rows.min_ps[at], numbers)
            ),
        )
        tokens: np.ndarray = drawn.cpu().numpy()
        return tokens

    def top_logprobs(
        self, logits: torch.Tensor, at: np.ndarray, sequences: SequenceOf[Sequence], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The `count` most probable next tokens of each sequence, and their log-probabilities.

        Penalties and bans change log-probabilities that are normalised already, as Hugging Face does for beams. Returns
        float32 [R, count], descending, and int32 [R, count].
        """
        with torch.inference_mode():
            if not self._rows.is_adjusted[at].any():
                values, token_ids = self._ops.top_logprobs(logits, count)
                return values.cpu().numpy(), token_ids.cpu().numpy()
            logprobs = torch.log_softmax(logits, dim=-1)
            for row, sequence in zip(logprobs, sequences, strict=True):
                self.adjust(row, sequence)
            values, indices = torch.topk(logprobs, count, dim=-1)
            return values.cpu().numpy(), indices.to(torch.int32).cpu().numpy()

    def adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
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
