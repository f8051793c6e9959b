"""Logits to tokens for a whole mixed batch: penalties, bans, then greedy or a draw, each row by its own parameters.

Order and definitions: repetition penalty over prompt and output (Hugging Face), presence and frequency penalty over the
output (OpenAI), `logit_bias` (OpenAI), `min_tokens` by banning the end tokens, a grammar by banning all that it does
not allow, then temperature, top-k, top-p, min-p as `kernels` defines them. A row's result depends on its own logits and
its own random number only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.randomness import uniform
from quire.worker.engine.scoring import score
from quire.worker.engine.sequence import Sequence
from quire.worker.models.batch import send

NEVER = float("-inf")


class Sampler:
    """Draws with the operations of a backend (`argmax`, `sample`), by the parameters that `rows` keeps."""

    def __init__(self, ops: Any, eos_token_ids: Iterable[int], rows: InputBatch) -> None:
        self._ops = ops
        self._eos = sorted(eos_token_ids)
        self._rows = rows
        self._device = torch.device(getattr(ops, "device", "cpu"))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, at: np.ndarray, sequences: SequenceOf[Sequence]) -> np.ndarray:
        """One token for each sequence: int32 [R].

        logits: [R, V] float32, row r for sequences[r], which lives in row at[r] of the persistent arrays; changed in
        place where penalties or bans apply. Log-probabilities that are asked for are noted with their sequences.
        """
        rows = self._rows
        scored = np.flatnonzero(rows.is_scored[at])
        plain = self._rows_of(logits, scored) if len(scored) else None  # what penalties do not touch
        self.adjust(logits, np.flatnonzero(rows.is_adjusted[at]), sequences)
        drawn = np.flatnonzero(rows.is_drawn[at])
        if len(drawn) == len(at):
            tokens = self._draw(logits, at)
        else:
            tokens = self._ops.argmax(logits)
            if len(drawn):
                by_chance = self._draw(self._rows_of(logits, drawn), at[drawn])
                tokens.index_copy_(0, self._sent(drawn), by_chance)
        if plain is not None:
            of = [sequences[row] for row in scored]
            score(self._ops, plain, self._rows_of(tokens, scored), of, rows.top_logprobs[at[scored]])
        # All is launched: what the host waits for now is the step itself.
        result: np.ndarray = tokens.cpu().numpy()
        return result

    def _draw(self, logits: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        rows = self._rows
        numbers = uniform(rows.seeds[at], rows.choices[at], rows.lengths[at].astype(np.uint64))
        columns = (rows.temperatures[at], rows.top_ks[at], rows.top_ps[at], rows.min_ps[at], numbers)
        drawn: torch.Tensor = self._ops.sample(logits, *map(self._sent, columns))
        return drawn

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        return send(torch.from_numpy(values), self._device)

    def _rows_of(self, values: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        return values.index_select(0, self._sent(at))

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
            self.adjust(logprobs, np.arange(len(sequences)), sequences)
            values, indices = torch.topk(logprobs, count, dim=-1)
            return values.cpu().numpy(), indices.to(torch.int32).cpu().numpy()

    def adjust(self, logits: torch.Tensor, at: np.ndarray, sequences: SequenceOf[Sequence]) -> None:
        """Penalties, biases and bans of the rows `at`.

        logits: [R, V] float32, contiguous, changed in place, all rows at once; sequences: of all R rows.
        """
        if not len(at):
            return
        vocabulary = logits.shape[1]
        seen: list[Mapping[int, int]] = [{}] * len(sequences)
        factors = np.zeros((3, len(sequences)), dtype=np.float32)  # of `penalise`
        factors[0] = 1.0
        biases: dict[int, float] = {}
        bans: list[int] = []
        allowed: dict[int, np.ndarray] = {}
        for row in at.tolist():
            sequence = sequences[row]
            params = sequence.group.sampling
            counts: Mapping[int, int] = sequence.output_counts or {}
            if params.repetition_penalty != 1.0:
                counts = {**dict.fromkeys(sequence.token_ids, 0), **counts}
            seen[row] = counts
            biases |= {row * vocabulary + token: bias for token, bias in params.logit_bias}
            factors[:, row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            if sequence.num_output_tokens < params.min_tokens and not params.ignore_eos:
                bans += [row * vocabulary + token for token in self._eos]
            if sequence.matcher is not None:
                allowed[row] = sequence.matcher.allowed()
        ids = np.array([token for counts in seen for token in counts], dtype=np.int32)
        if len(ids):
            starts = np.cumsum([0, *map(len, seen)]).astype(np.int32)
            times = np.array([count for counts in seen for count in counts.values()], dtype=np.int32)
            of_device = getattr(self._ops, "penalise", penalise)
            of_device(logits, *map(self._sent, (starts, ids, times, *factors)))
        if biases:
            where = self._sent(np.array(list(biases), dtype=np.int64))
            logits.view(-1).index_add_(0, where, self._sent(np.array(list(biases.values()), dtype=np.float32)))
        if bans:
            logits.view(-1).index_fill_(0, self._sent(np.array(bans)), NEVER)
        for row, words in allowed.items():
            restrict(logits[row], words)


def restrict(logits: torch.Tensor, words: np.ndarray) -> None:
    """Ban what has no bit. logits: [V], changed in place; words: int32 [V / 32 or more], lowest bit first."""
    has_none = np.unpackbits(~words.view(np.uint8), count=len(logits), bitorder="little").view(np.bool_)
    logits.masked_fill_(send(torch.from_numpy(has_none), logits.device), NEVER)


def penalise(
    logits: torch.Tensor,
    starts: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """`TritonOps.penalise` in plain torch."""
    rows = torch.arange(len(logits)).repeat_interleave(starts.diff())
    at = rows * logits.shape[1] + ids
    flat = logits.view(-1)
    values, factor = flat[at], repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    drawn = presence[rows] + frequency[rows] * counts
    flat[at] = values - torch.where(counts > 0, drawn, 0.0)
