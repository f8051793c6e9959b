"""Results of a step: new tokens become `StepItem`s, and sequences end.

A sequence ends with an end token or a stop token, with a stop string in its text, where it repeats itself, or with its
token number max_tokens.
A group ends when all its sequences have ended; its last item has the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat

import numpy as np

from quire.shared.protocol.messages import BY_TOKEN, Delta, Outcome, PredictionCounts, StepItem
from quire.shared.protocol.states import OutcomeName
from quire.shared.text.detokenizer import TokenDecoder as TextDecoder
from quire.worker.engine.features.repetition import repeats_itself
from quire.worker.engine.in_flight import InFlightStep
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.stop_strings import StopStringMatcher

# Makes a named tuple from a tuple of its fields, in less time than its constructor takes.
_new = tuple.__new__


class Results:
    """Makes the items of a step.

    tokenizer: turns ids into text for sequences with stop strings; no other sequence is detokenized.
    end(sequence, count): called when a sequence has ended with its output token number `count`.
    forget(group): called when the outcome of a group is known, just before its last item is made. Returns the counts of
    the group's prediction, if it has one.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        tokenizer: TextDecoder | None,
        end: Callable[[Sequence, int], None],
        forget: Callable[[SequenceGroup], PredictionCounts | None],
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._end = end
        self._forget_group = forget
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[[token for token in eos_token_ids if token < vocab_size]] = True
        self._stops: dict[Sequence, StopStringMatcher] = {}
        self._deltas = _Deltas()

    def watch(self, sequence: Sequence) -> None:
        """Look for the sequence's stop strings, if it has any, from its first output token on.

        A fork continues after a stop string of the text that it keeps.
        """
        stop = sequence.group.sampling.stop
        if stop and self._tokenizer is not None:
            skips = sequence.group.sampling.skip_special_tokens
            matcher = StopStringMatcher(self._tokenizer, stop, skips)
            if matcher.push([*sequence.group.kept]) is not None:
                matcher = StopStringMatcher(self._tokenizer, stop, skips)
            matcher.push(sequence.token_ids[sequence.num_prompt_tokens :])
            self._stops[sequence] = matcher

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Stop looking for stop strings of these sequences."""
        for sequence in sequences:
            self._stops.pop(sequence, None)

    def watched(self) -> Iterable[Sequence]:
        return self._stops.keys()

    def of(self, step: InFlightStep, tokens: np.ndarray, token_ids: list[int]) -> list[StepItem]:
        """End the sequences that end with their token of a step, note them in `step.ended`, and return the new items.

        tokens: int32 [R]; token_ids: the same as a list.
        """
        batch, sequences = step.batch, step.batch.sequences
        may_end = np.flatnonzero((self._is_eos[tokens] & step.heeds_eos) | step.is_watched | step.is_last)
        outputs = step.lengths - step.prompt_lengths
        ended = [i for i in may_end.tolist() if self._ends(sequences[i], token_ids[i], int(outputs[i]) + 1)]
        step.ended.extend(sequences[i] for i in ended)
        if batch.are_single:
            # The loop runs in C, since its cost grows with the number of sequences.
            deltas = map(self._deltas.__getitem__, token_ids)
            fields = zip(batch.request_ids, outputs.tolist(), deltas, repeat(None), repeat(None))
            items: list[StepItem] = list(map(_new, repeat(StepItem), fields))
            for index in {*ended, *batch.with_logprobs, *batch.without_report}:
                items[index] = self.item(sequences[index].group, [_delta(sequences[index], token_ids[index])])
            batch.without_report.clear()
            return items
        new: dict[SequenceGroup, list[Delta]] = {}
        for sequence, token in zip(sequences, token_ids, strict=True):
            if sequence.group.is_streamed:
                new.setdefault(sequence.group, []).append(_delta(sequence, token))
        for group in dict.fromkeys(sequences[index].group for index in ended):
            if not group.is_streamed and group.is_finished:
                new[group] = _best(group)
        return [self.item(group, made) for group, made in new.items()]

    def item(self, group: SequenceGroup, deltas: list[Delta]) -> StepItem:
        """Return the item with the new deltas of a group. The item has the outcome if the group has ended."""
        outcome = _outcome(group, deltas) if group.is_finished else None
        start = group.num_emitted - len(deltas) if group.is_streamed else 0
        if outcome is not None and (counts := self._forget_group(group)) is not None:
            outcome = outcome._replace(prediction=counts)
        return StepItem(group.request_id, start, tuple(deltas), outcome, group.take_report())

    def _ends(self, sequence: Sequence, token: int, count: int) -> bool:
        """End the sequence if `token`, its output token number `count`, is its last one. Returns whether it is."""
        params = sequence.group.sampling
        matcher = self._stops.get(sequence)
        if token in self._eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = OutcomeName.STOP
        elif token in params.stop_token_ids:
            sequence.finish_reason, sequence.matched_stop = OutcomeName.STOP, BY_TOKEN
        elif matcher is not None and (matched := matcher.push([token])) is not None:
            sequence.finish_reason, sequence.matched_stop = OutcomeName.STOP, matched
        elif params.repetition_detection and self._repeats_itself(sequence, count):
            sequence.finish_reason = OutcomeName.REPETITION
        elif count >= params.max_tokens:
            sequence.finish_reason = OutcomeName.LENGTH
        else:
            return False
        self._stops.pop(sequence, None)
        self._end(sequence, count)
        return True

    @staticmethod
    def _repeats_itself(sequence: Sequence, count: int) -> bool:
        """Return whether the output repeats itself at its token number `count`. Tokens that a fork keeps count, too."""
        shortest, longest, copies = sequence.group.sampling.repetition_detection
        start = sequence.num_prompt_tokens - sequence.group.num_kept
        end = sequence.num_prompt_tokens + count
        return repeats_itself(sequence.token_ids[max(start, end - longest * copies) : end], shortest, longest, copies)


class _Deltas(dict[int, tuple[Delta]]):
    """The deltas of a request with one sequence, by token. Cached, so that a step makes no new object per sequence."""

    def __missing__(self, token: int) -> tuple[Delta]:
        if len(self) >= 1 << 16:
            self.clear()
        made = self[token] = (Delta(0, (token,), None, None, None, None),)
        return made


def _best(group: SequenceGroup) -> list[Delta]:
    """Return the n choices with the highest mean log-probability (OpenAI API reference, `best_of`)."""
    ranked = sorted(group.sequences, key=_mean_logprob, reverse=True)[: group.sampling.n]
    return [
        Delta(choice, best.output, best.finish_reason, best.matched_stop, _mean_logprob(best), best.take_logprobs())
        for choice, best in enumerate(ranked)
    ]


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.logprob / sequence.num_output_tokens


def _delta(sequence: Sequence, token: int) -> Delta:
    """Return the delta of one new token."""
    logprobs = sequence.take_logprobs()
    return Delta(sequence.choice, (token,), sequence.finish_reason, sequence.matched_stop, None, logprobs)


def _outcome(group: SequenceGroup, last: list[Delta]) -> Outcome:
    """Return how a finished group ended: LENGTH if at least one choice reached max_tokens, else REPETITION if one
    repeated itself."""
    reasons = {choice.finish_reason for choice in (group.sequences if group.is_streamed else last)}
    names = (OutcomeName.LENGTH, OutcomeName.REPETITION)
    return Outcome(next((name for name in names if name in reasons), OutcomeName.STOP))
