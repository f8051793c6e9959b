"""Logits to tokens for a mixed batch: penalties and bans, then the most probable token or a draw, row by row.

Order and definitions: repetition penalty over prompt and output (Hugging Face), presence and frequency penalty over the
output (OpenAI), `logit_bias` (OpenAI), `min_tokens` by banning the end tokens, a grammar by banning all tokens that it
does not allow, `allowed_token_ids` (vLLM) by banning all others, `bad_words` (vLLM) by banning the last token of a word
after its other tokens, then temperature, top-k, top-p and min-p (`quire.kernels.ops.Ops.sample`). The result of a row
depends on its own logits, parameters and random number only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from quire.kernels import Ops
from quire.shared.text.detokenizer import TokenDecoder as TextDecoder
from quire.shared.text.panics import faults_as
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.randomness import uniform
from quire.worker.engine.scoring import ScoredRows
from quire.worker.engine.seen_tokens import SeenTokens
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.transfers import send

NEVER = float("-inf")
# A mask is sparse if at most one in SPARSE of its words of 32 bits has a set bit.
SPARSE = 4
# Bytes of logits whose masks a device expands at once.
MASKED_BYTES = 1 << 25


class Sampler:
    """Samples with the operations of a backend, by the parameters in the input batch."""

    def __init__(self, ops: Ops, eos_token_ids: Iterable[int], input_batch: InputBatch) -> None:
        self.ops = ops
        self._eos = sorted(eos_token_ids)
        self._input_batch = input_batch

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: np.ndarray, sequences: SequenceOf[Sequence]) -> np.ndarray:
        """Return one token for each sequence: int32 [R].

        logits: [R, V] float32, changed in place by penalties and bans. rows: int64 [R], row of each sequence in the
        input batch. Log-probabilities that requests ask for are recorded with their sequences.
        """
        scored = self.prepare(logits, rows, sequences)
        drawn = np.flatnonzero(self._input_batch.is_drawn[rows])
        if len(drawn) == len(rows):
            tokens = self._draw(logits, rows)
        else:
            tokens = self.ops.argmax(logits)
            if len(drawn):
                at = self._send(drawn)
                tokens.index_copy_(0, at, self._draw(logits.index_select(0, at), rows[drawn]))
        scores = scored.launch(self.ops, tokens) if scored is not None else None
        # The host waits only here, once everything has been launched.
        result: np.ndarray = tokens.cpu().numpy()
        if scores is not None:
            scores.record(sequences)
        return result

    def prepare(self, logits: torch.Tensor, rows: np.ndarray, sequences: SequenceOf[Sequence]) -> ScoredRows | None:
        """Apply penalties, biases and bans to the logits, without waiting for the device, in torch's inference mode.

        Arguments as for `sample`. Returns the rows whose tokens get log-probabilities; None without such rows.
        """
        batch, scored = self._input_batch, None
        if len(at := np.flatnonzero(batch.is_scored[rows])):
            on_device = self._send(at)
            scored = ScoredRows(at, on_device, logits.index_select(0, on_device), batch.top_logprobs[rows[at]])
        self.adjust(logits, np.flatnonzero(batch.is_adjusted[rows]), sequences)
        return scored

    def _draw(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Draw one token at random for each row of logits."""
        batch = self._input_batch
        positions = batch.lengths[rows].astype(np.uint64)
        return self.ops.sample(
            logits,
            self._send(batch.temperatures[rows]),
            self._send(batch.top_ks[rows]),
            self._send(batch.top_ps[rows]),
            self._send(batch.min_ps[rows]),
            self._send(uniform(batch.seeds[rows], batch.choices[rows], positions)),
        )

    def _send(self, values: np.ndarray) -> torch.Tensor:
        return send(torch.from_numpy(values), self.ops.device)

    def top_logprobs(
        self, logits: torch.Tensor, rows: np.ndarray, sequences: SequenceOf[Sequence], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of the `count` most probable next tokens of each sequence, and the tokens.

        Penalties and bans apply to the normalised log-probabilities, as in Hugging Face's beam search. Returns float32
        [R, count], descending, and int32 [R, count].
        """
        with torch.inference_mode():
            if not self._input_batch.is_adjusted[rows].any():
                values, token_ids = self.ops.top_logprobs(logits, count)
                return values.cpu().numpy(), token_ids.cpu().numpy()
            logprobs = torch.log_softmax(logits, dim=-1)
            self.adjust(logprobs, np.arange(len(sequences)), sequences)
            values, indices = torch.topk(logprobs, count, dim=-1)
            return values.cpu().numpy(), indices.to(torch.int32).cpu().numpy()

    def adjust(self, logits: torch.Tensor, at: np.ndarray, sequences: SequenceOf[Sequence]) -> None:
        """Apply penalties, biases and bans to the rows `at` of the logits.

        logits: [R, V] float32, contiguous, changed in place. at: indices into the R rows. sequences: of all R rows.
        """
        if not len(at):
            return
        vocabulary = logits.shape[1]
        seen: list[SeenTokens] = []
        sizes = np.zeros(len(sequences) + 1, dtype=np.int32)  # sizes[i + 1]: tokens seen by row i
        repetition = np.ones(len(sequences), dtype=np.float32)
        presence = np.zeros(len(sequences), dtype=np.float32)
        frequency = np.zeros(len(sequences), dtype=np.float32)
        biases: dict[int, float] = {}
        bans: list[int] = []
        allowed: dict[int, np.ndarray] = {}
        for row in at.tolist():
            sequence = sequences[row]
            params = sequence.group.sampling
            if sequence.seen is not None:
                seen.append(sequence.seen)
                sizes[row + 1] = len(sequence.seen)
            biases |= {row * vocabulary + token: bias for token, bias in params.logit_bias}
            repetition[row] = params.repetition_penalty
            presence[row], frequency[row] = params.presence_penalty, params.frequency_penalty
            if sequence.num_output_tokens < params.min_tokens and not params.ignore_eos:
                bans += [row * vocabulary + token for token in self._eos]
            given = sequence.num_prompt_tokens - sequence.group.num_kept
            for word in sequence.group.bad_words:
                start = len(sequence.token_ids) - len(word) + 1
                if start >= given and sequence.token_ids[start:] == [*word[:-1]]:
                    bans.append(row * vocabulary + word[-1])
            if sequence.group.allowed_tokens is not None:
                allowed[row] = sequence.group.allowed_tokens
            if sequence.matcher is not None and (mask := sequence.matcher.allowed()) is not None:
                allowed[row] = mask
        if sizes.any():
            self.ops.penalise(
                logits,
                self._send(np.cumsum(sizes, dtype=np.int32)),
                self._send(np.concatenate([tokens.ids for tokens in seen])),
                self._send(np.concatenate([tokens.counts for tokens in seen])),
                self._send(repetition),
                self._send(presence),
                self._send(frequency),
            )
        if biases:
            where = self._send(np.array(list(biases), dtype=np.int64))
            logits.view(-1).index_add_(0, where, self._send(np.array(list(biases.values()), dtype=np.float32)))
        if bans:
            logits.view(-1).index_fill_(0, self._send(np.array(bans)), NEVER)
        restrict(logits, allowed)


def bad_word_tokens(
    words: Iterable[str], tokenizer: TextDecoder | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, at the beginning of a text and after a space (vLLM's `bad_words`).

    A sequence with a token that the model lacks cannot be generated, and is left out. Raises RequestRefused.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise RequestRefused("bad_words needs a tokenizer, and this engine has none")
    with faults_as(lambda reason: RequestRefused(f"the tokenizer fails at bad_words: {reason}")):
        sequences = {
            tuple(tokenizer.encode(space + word.lstrip(" "), add_special_tokens=False).ids): None
            for word in words
            for space in ("", " ")
        }
    return tuple(token_ids for token_ids in sequences if token_ids and max(token_ids) < vocab_size)


def token_mask(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return a mask with a bit for each of the tokens, as `restrict` takes it: int32 [V / 32, rounded up]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[[token for token in token_ids if token < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def restrict(logits: torch.Tensor, masks: Mapping[int, np.ndarray]) -> None:
    """Ban the tokens without a bit. logits: [R, V], contiguous, changed in place.

    masks: the mask of each row that has one, int32 [V / 32 or more], lowest bit first.
    """
    if logits.device.type == "cpu":
        restrict_on_host(logits, masks)
    elif masks:
        restrict_on_device(logits, masks)


def restrict_on_device(logits: torch.Tensor, masks: Mapping[int, np.ndarray]) -> None:
    """Ban the tokens without a bit, as `restrict` does. The device gets the bits, and expands them.

    The time of the host matters, since the device may be waiting for the masks: a part of at most MASKED_BYTES takes
    the same few launches, however many rows it has.
    """
    vocabulary, device = logits.shape[1], logits.device
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    at_once = max(1, MASKED_BYTES // (4 * vocabulary))
    rows = list(masks)
    for part in (rows[first : first + at_once] for first in range(0, len(rows), at_once)):
        words = np.stack([masks[row][: -(-vocabulary // 32)] for row in part])
        bits = send(torch.from_numpy(words.view(np.uint8)), device)[:, :, None] >> shifts
        is_banned = bits.bitwise_and_(1).flatten(1)[:, :vocabulary] == 0
        at = send(torch.tensor(part), device)
        logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(is_banned, NEVER))


def restrict_on_host(logits: torch.Tensor, masks: Mapping[int, np.ndarray]) -> None:
    """Ban the tokens without a bit, as `restrict` does, with little work for the processor.

    In free text nearly all tokens are allowed, and in a structure few: then only the banned or the allowed tokens
    are written one by one.
    """
    vocabulary = logits.shape[1]
    few = vocabulary // 32 // SPARSE
    banned: list[np.ndarray] = []
    for row, words in masks.items():
        if (tokens := positions(~words, vocabulary, few)) is not None:
            banned.append(tokens + row * vocabulary)
        elif (tokens := positions(words, vocabulary, few)) is not None:
            at = torch.from_numpy(tokens)
            kept = logits[row].index_select(0, at)
            logits[row].fill_(NEVER).index_copy_(0, at, kept)
        else:
            has_none = np.unpackbits(~words.view(np.uint8), count=vocabulary, bitorder="little").view(np.bool_)
            logits[row].masked_fill_(torch.from_numpy(has_none), NEVER)
    if banned:
        logits.view(-1).index_fill_(0, torch.from_numpy(np.concatenate(banned)), NEVER)


def positions(words: np.ndarray, count: int, most: int) -> np.ndarray | None:
    """Return the positions of the set bits among the first `count`, int64 ascending; None if more words have any.

    words: int32, lowest bit first. most: the number of words.
    """
    words = words[: -(-count // 32)]
    at = np.flatnonzero(words)
    if len(at) > most:
        return None
    bits = np.flatnonzero(np.unpackbits(words[at].view(np.uint8), bitorder="little"))
    set_bits: np.ndarray = at[bits >> 5] * 32 + (bits & 31)
    return set_bits[: np.searchsorted(set_bits, count)]
