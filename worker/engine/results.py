"""What leaves the engine: drawn tokens become `StepItem`s, and it is found who ends with them.

A sequence ends with an end token or a stop token, with a stop string in its text, or with the last token that was asked
for. A group has ended when all its sequences have; its last item says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat

import numpy as np

from quire.shared.messages import BY_TOKEN, Delta, Outcome, StepItem
from quire.shared.text.detokenizer import IncrementalDetokenizer, context_of
from quire.shared.text.detokenizer import TokenDecoder as TextDecoder
from quire.shared.text.stop_strings import StopStringFilter
from quire.worker.engine.beams import EndedBeam
from quire.worker.engine.in_flight import InFlightStep
from quire.worker.engine.sequence import Sequence, SequenceGroup

_new = tuple.__new__


class Results:
    """Makes the items of a step.

    tokenizer: turns ids into text for sequences with stop strings; others are never detokenized.
    end(sequence, count): called when a sequence has ended with its output token number `count`.
    forget(group): called when the last item of a group has been made.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        tokenizer: TextDecoder | None,
        end: Callable[[Sequence, int], None],
        forget: Callable[[SequenceGroup], None],
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
        """Look for the sequence's stop strings, if it has any, from its first output token on."""
        stop = sequence.group.sampling.stop
        if stop and self._tokenizer is not None:
            watch = self._stops[sequence] = StopStringMatcher(self._tokenizer, stop)
            watch.push(sequence.token_ids[sequence.num_prompt_tokens :])

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Look at the text of these no more."""
        for sequence in sequences:
            self._stops.pop(sequence, None)

    def watched(self) -> Iterable[Sequence]:
        return self._stops.keys()

    def of(self, flight: InFlightStep, tokens: np.ndarray, drawn: list[int]) -> list[StepItem]:
        """The tokens of a step, [R] and as a list, are known: end what ends here, and say what is new."""
        active, sequences = flight.active, flight.active.sequences
        ending = np.flatnonzero((self._is_eos[tokens] & flight.heeds_eos) | flight.is_watched | flight.is_last)
        outputs = flight.lengths - flight.prompt_lengths
        over = [i for i in ending.tolist() if self._is_over(sequences[i], drawn[i], int(outputs[i]) + 1)]
        if active.are_single:
            # A loop without Python's: of what a step costs, the items grow with the sequences.
            deltas = map(self._deltas.__getitem__, drawn)
            fields = zip(active.request_ids, outputs.tolist(), deltas, repeat(None))
            plain: list[StepItem] = list(map(_new, repeat(StepItem), fields))
            for index in {*over, *active.with_logprobs}:
                plain[index] = self.item(sequences[index].group, [_delta(sequences[index], drawn[index])])
            return plain
        new: dict[SequenceGroup, list[Delta]] = {}
        for sequence, token in zip(sequences, drawn, strict=True):
            if sequence.group.is_streamed:
                new.setdefault(sequence.group, []).append(_delta(sequence, token))
        for group in dict.fromkeys(sequences[index].group for index in over):
            if not group.is_streamed and group.is_finished:
                new[group] = _best(group)
        return [self.item(group, made) for group, made in new.items()]

    def item(self, group: SequenceGroup, deltas: list[Delta]) -> StepItem:
        """What is new of a group; the last of it if the group has ended."""
        outcome = _outcome(group, deltas) if group.is_finished else None
        start = group.num_emitted - len(deltas) if group.is_streamed else 0
        if outcome is not None:
            self._forget_group(group)
        return StepItem(group.request_id, start, tuple(deltas), outcome)

    def _is_over(self, sequence: Sequence, token: int, count: int) -> bool:
        """Whether a sequence ends with its output token number `count`, which it has drawn."""
        params = sequence.group.sampling
        watch = self._stops.get(sequence)
        if token in self._eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif token in params.stop_token_ids:
            sequence.finish_reason, sequence.matched_stop = "stop", BY_TOKEN
        elif watch is not None and (matched := watch.push([token])) is not None:
            sequence.finish_reason, sequence.matched_stop = "stop", matched
        elif count >= params.max_tokens:
            sequence.finish_reason = "length"
        else:
            return False
        self._stops.pop(sequence, None)
        self._end(sequence, count)
        return True


class StopStringMatcher:
    """Looks for the stop strings of one sequence in its text, as the gateway will."""

    def __init__(self, tokenizer: TextDecoder, stop: tuple[str, ...]) -> None:
        self._text = IncrementalDetokenizer(tokenizer, context_of(tokenizer))
        self._filter = StopStringFilter(stop)

    def push(self, token_ids: list[int]) -> str | None:
        """Take tokens; the stop string that their text completes, if any."""
        self._filter.push(self._text.push(token_ids))
        return self._filter.matched


class _Deltas(dict[int, tuple[Delta]]):
    """What a step adds to a request with one sequence: a token. Made once for each token, and not in every step."""

    def __missing__(self, token: int) -> tuple[Delta]:
        if len(self) >= 1 << 16:
            self.clear()
        made = self[token] = (Delta(0, (token,), None, None, None, None),)
        return made


def best_beams(ended: list[EndedBeam]) -> list[Delta]:
    """The results of a beam search, best first."""
    return [Delta(choice, one.token_ids, one.finish_reason, None, one.score) for choice, one in enumerate(ended)]


def _best(group: SequenceGroup) -> list[Delta]:
    """The n choices with the highest mean log-probability (OpenAI API reference, `best_of`)."""
    ranked = sorted(group.sequences, key=lambda sequence: -sequence.logprob / sequence.num_output_tokens)
    return [
        Delta(
            choice,
            one.output,
            one.finish_reason,
            one.matched_stop,
            one.logprob / one.num_output_tokens,
            one.take_logprobs(),
        )
        for choice, one in enumerate(ranked[: group.sampling.n])
    ]


def _delta(sequence: Sequence, token: int) -> Delta:
    """The token that a sequence has just drawn."""
    logprobs = sequence.take_logprobs()
    return Delta(sequence.choice, (token,), sequence.finish_reason, sequence.matched_stop, None, logprobs)


def _outcome(group: SequenceGroup, last: list[Delta]) -> Outcome:
    """How a finished group ended: for want of tokens if one of its choices did."""
    choices = group.sequences if group.is_streamed else last
    return Outcome("length" if "length" in {choice.finish_reason for choice in choices} else "stop")
