"""Replays: the tokens of a logged output are chosen again, and compared with the log.

Prompt and output are computed as one prompt in chunks (teacher forcing), as preemption by recomputation does. At each
position of the output the sampler, with the request's own parameters and random numbers, chooses a token from the
logits. What penalties, banned words and the grammar see at a position are the logged tokens before it, so all positions
of a chunk are sampled at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from quire.kernels import Ops
from quire.shared.protocol.logprobs import TokenLogprobs
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.thinking import with_budget
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import MAX_SCORED_POSITIONS, RequestRefused
from quire.worker.engine.sampler import Sampler
from quire.worker.engine.scoring import ScoredPositions
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.transfers import send

# Computes a prompt, and generates nothing.
NO_TOKENS = SamplingParams(max_tokens=0)
# Tokens that penalties apply to, of all positions that are sampled at once.
MAX_SEEN = 1 << 20
# The remainder of a distribution in float32 is known no better than this, and a log-probability counts no lower.
LEAST_REMAINDER, LEAST_LOGPROB = 1e-7, -100.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output token that a replay chooses differently. The log-probabilities are the model's own."""

    position: int
    logged: int
    chosen: int
    logged_logprob: float
    chosen_logprob: float


class Replay(ScoredPositions):
    """The output of one choice of a request, compared with what the engine chooses. `run` computes it.

    num_compared, num_equal: tokens so far. A logged token that the grammar does not allow ends the comparison.
    margins: of each token that differs, how far apart the log-probabilities of the chosen and of the logged token are.
    logprob_error: largest difference to a logged log-probability; None unless the log has some. divergences: at each
    token, if the log has log-probabilities (see the function of this name).
    Raises RequestRefused if the request cannot run here, or ranks its choices.
    """

    def __init__(
        self,
        engine: Engine,
        request: GenerationRequest,
        choice: int,
        output: SequenceOf[int],
        logprobs: SequenceOf[TokenLogprobs] = (),
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        if request.pooling or not output:
            raise RequestRefused("the request has no tokens to compare")
        if not request.sampling.is_streamed:
            raise RequestRefused("only the best results of best_of and beam searches are logged, not what was ranked")
        most = max(output) if not logprobs else max(*output, *(token for one in logprobs for token, _ in one.top))
        if most >= engine.vocab_size:
            raise RequestRefused(f"token id {most} is outside the vocabulary of {engine.vocab_size}")
        super().__init__(len(request.prompt) - 1, len(request.prompt) + len(output) - 1)
        self.output = tuple(output)
        self.num_compared = self.num_equal = 0
        self.difference: Difference | None = None
        self.margins: list[float] = []
        self.logprob_error: float | None = 0.0 if logprobs else None
        self.divergences: list[float] = []
        self._logprobs = logprobs
        self._engine, self._request, self._pictures = engine, request, pictures
        self._is_over = False
        group = engine.group_of(request)
        group.start()
        self._sequence = group.sequences[choice]
        grammar = None
        if request.sampling.grammar:
            if engine.grammars is None:
                raise RequestRefused("this engine has no grammars")
            grammar = engine.grammars.matcher(request.sampling.grammar)
            grammar.consume(group.kept)
        self._sequence.matcher = with_budget(request.sampling, engine.vocab_size, grammar, group.kept)
        # A batch of its own: each row has the parameters of the sequence, at another position.
        limits = replace(engine.limits, max_num_seqs=MAX_SCORED_POSITIONS, max_model_len=engine.limits.block_size)
        self._batch = InputBatch(limits)
        self._batch.reserve(group, 1)
        self._batch.assign(self._sequence)
        for values in vars(self._batch).values():
            if isinstance(values, np.ndarray):
                values[:] = values[self._sequence.row]
        self._batch.is_scored[:] = False
        self._sampler = Sampler(engine.sampler.ops, engine.eos_token_ids, self._batch)

    def run(self) -> None:
        """Compute the replay, and whatever else the engine has to do. Raises RequestRefused."""
        self.start()
        while self._request.id in self._engine.requests:
            self._engine.step()

    def start(self) -> None:
        """Add the computation to the engine, under the id of the request. Raises RequestRefused."""
        forced = (*self._request.prompt, *self.output[:-1])
        request = replace(self._request, prompt=forced, sampling=NO_TOKENS, forked_from="", num_kept=0)
        self._engine.add(request, scores=self, pictures=self._pictures)

    def take(self, ops: Ops, logits: torch.Tensor) -> None:
        """Choose the tokens of the next positions, and compare them. logits: float32 [P, V], changed in place."""
        first = self.num_scored - len(self._request.prompt) + 1
        self.num_scored += len(logits)
        if self._is_over:
            return
        logged = self.output[first : first + len(logits)]
        # Log-probabilities are those before penalties and bans.
        own = logits.clone() if self._sequence.group.changes_logits else logits
        if self._logprobs:
            self._compare_logprobs(ops, own, logged, self._logprobs[first : first + len(logits)])
        chosen = self._choose(logits, first, logged)
        self.num_compared += len(chosen)
        differs = np.flatnonzero(chosen != np.array(logged[: len(chosen)]))
        self.num_equal += len(chosen) - len(differs)
        if not len(differs):
            return
        rows = own.index_select(0, send(torch.from_numpy(differs), ops.device))
        tokens = [logged[at] for at in differs], chosen[differs].tolist()
        scores = [self._logprobs_of(ops, rows, one) for one in tokens]
        self.margins += np.minimum(np.abs(scores[1] - scores[0]), -LEAST_LOGPROB).tolist()
        if self.difference is None:
            place, (one, other) = first + int(differs[0]), tokens
            self.difference = Difference(place, one[0], other[0], float(scores[0][0]), float(scores[1][0]))

    def _compare_logprobs(
        self, ops: Ops, own: torch.Tensor, tokens: tuple[int, ...], logged: SequenceOf[TokenLogprobs]
    ) -> None:
        """Compare the distributions of positions with what the log has of them. own: float32 [P, V]."""
        found = self._logprobs_of(ops, own, tokens)
        there = np.array([[one.logprob, *(logprob for _, logprob in one.top)] for one in logged])
        self.logprob_error = max(self.logprob_error or 0.0, float(np.abs(found - there[:, 0]).max()))
        ids = np.array([[token, *(other for other, _ in one.top)] for token, one in zip(tokens, logged, strict=True)])
        with torch.inference_mode():
            values = own.gather(1, send(torch.from_numpy(ids), ops.device)).cpu().numpy().astype(np.float64)
        # A token may be among the most probable ones, too.
        is_first = np.concatenate([np.ones((len(ids), 1), dtype=bool), ids[:, 1:] != ids[:, :1]], axis=1)
        here = values - values[:, :1] + found[:, None]
        self.divergences += divergences(there, here, is_first).tolist()

    def _choose(self, logits: torch.Tensor, first: int, logged: tuple[int, ...]) -> np.ndarray:
        """Return the tokens that the sampler chooses, int32 [P], fewer if the grammar ends before.

        first: the position of the first of them in the output.
        """
        sequence, rows = self._sequence, np.arange(len(logits))
        self._batch.lengths[rows] = len(self._request.prompt) + first + rows
        if not sequence.group.has_history and not self._request.sampling.min_tokens:
            return self._sampler.sample(logits, rows, [sequence] * len(rows))
        chosen, at = [], 0
        while at < len(logged) and not self._is_over:
            states = self._states(logged[at:])
            end = at + len(states)
            chosen.append(self._sampler.sample(logits[at:end], rows[at:end], states))
            at = end
        return np.concatenate(chosen)

    def _states(self, logged: tuple[int, ...]) -> list[Sequence]:
        """Advance the sequence by the next logged tokens. Returns what the sampler sees of it before each of them."""
        sequence, states, size = self._sequence, list[Sequence](), 0
        # Banned words look at the last tokens only.
        longest = max((len(word) for word in sequence.group.bad_words), default=0)
        for token in logged:
            left_out = max(0, len(sequence.token_ids) - longest)
            state = _State(sequence.group, sequence.token_ids[left_out:], sequence.num_prompt_tokens - left_out)
            # The state has what the sampler reads.
            states.append(cast(Sequence, state))
            sequence.token_ids.append(token)
            if (seen := sequence.seen) is not None:
                state.seen = _Seen(seen.ids, seen.counts.copy())
                size += len(seen)
                seen.add(token)
            if (matcher := sequence.matcher) is not None:
                state.matcher = _Allowed(matcher.allowed())
                matcher.consume([token])
                self._is_over = matcher.error is not None
            if self._is_over or size > MAX_SEEN:
                break
        return states

    def _logprobs_of(self, ops: Ops, logits: torch.Tensor, token_ids: SequenceOf[int]) -> np.ndarray:
        with torch.inference_mode():
            tokens = send(torch.tensor(token_ids, dtype=torch.int64), ops.device)
            found: np.ndarray = ops.logprobs_of(logits, tokens).cpu().numpy()
        return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """The tokens that penalties apply to at one position, as `SeenTokens` has them."""

    ids: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The state of a grammar at one position."""

    mask: np.ndarray | None

    def allowed(self) -> np.ndarray | None:
        return self.mask


@dataclass(slots=True)
class _State:
    """A sequence at one position, with its last tokens only."""

    group: SequenceGroup
    token_ids: list[int]
    num_prompt_tokens: int
    seen: _Seen | None = None
    matcher: _Allowed | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def divergences(logged: np.ndarray, found: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """Return lower bounds of the Kullback-Leibler divergence from one distribution to another, in nats: float64 [P].

    logged, found: log-probabilities of the same tokens in both, [P, K]; is_counted: those that count, booleans [P, K].
    All other tokens count as one, and no coarser view of two distributions has a larger divergence.
    """
    logged, found = logged.astype(np.float64), np.maximum(found, LEAST_LOGPROB)
    here, there = np.where(is_counted, np.exp(logged), 0.0), np.where(is_counted, np.exp(found), 0.0)
    rest, other = (np.maximum(1.0 - part.sum(axis=1), LEAST_REMAINDER) for part in (here, there))
    terms = np.where(here > 0, here * (np.maximum(logged, LEAST_LOGPROB) - found), 0.0)
    bounds: np.ndarray = np.maximum(terms.sum(axis=1) + rest * np.log(rest / other), 0.0)
    return bounds
