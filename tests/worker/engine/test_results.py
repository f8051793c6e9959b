"""Results of a step: the items of each request, and the sequences that end with their new token."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.protocol.messages import Delta, Outcome, SamplingParams, StepItem
from quire.worker.engine.features.beams import EndedBeam, best_beams
from quire.worker.engine.in_flight import InFlightStep
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.results import Results, StopStringMatcher
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.step import DecodeBatch
from tests.support.mock_model import Letters
from tests.support.tokenizers import byte_fallback, byte_level

EOS, VOCAB = 0, 26


class Sink:
    """Results over sequences with rows in an input batch, and what they report."""

    def __init__(self) -> None:
        limits = EngineLimits(num_blocks=8, block_size=4, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=32)
        self.input_batch = InputBatch(limits)
        self.ended: list[tuple[int, int]] = []
        self.forgotten: list[str] = []
        self.results = Results(
            frozenset([EOS]),
            VOCAB,
            Letters(),
            lambda sequence, count: self.ended.append((sequence.choice, count)),
            lambda group: self.forgotten.append(group.request_id),
        )

    def group(self, name: str, **params: object) -> SequenceGroup:
        group = SequenceGroup(name, (1, 2), SamplingParams(**({"max_tokens": 4} | params)))  # type: ignore[arg-type]
        group.start()
        self.input_batch.reserve(group, len(group.sequences))
        for sequence in group.sequences:
            self.input_batch.assign(sequence)
            self.results.watch(sequence)
        return group

    def give(self, sequences: list[Sequence], token_ids: list[int]) -> tuple[list[object], InFlightStep]:
        """The items of a step in which each sequence gets a token."""
        tokens = np.array(token_ids, dtype=np.int32)
        step = InFlightStep.begin(DecodeBatch.of(sequences), tokens, self.input_batch)
        for sequence, token in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token)
        return [*self.results.of(step, tokens, token_ids)], step


def test_single_sequences_get_an_item_each_and_the_last_one_has_the_outcome() -> None:
    sink = Sink()
    one, two = sink.group("one").sequences, sink.group("two").sequences
    items, step = sink.give([*one, *two], [5, EOS])
    assert items == [
        StepItem("one", 0, (Delta(0, (5,)),), None),
        StepItem("two", 0, (Delta(0, (EOS,), "stop"),), Outcome("stop")),
    ]
    assert step.ended == two
    assert (sink.ended, sink.forgotten) == ([(0, 1)], ["two"])


def test_a_sequence_ends_with_its_token_number_max_tokens() -> None:
    sink = Sink()
    [sequence] = sink.group("a", max_tokens=2).sequences
    assert sink.give([sequence], [5])[0] == [StepItem("a", 0, (Delta(0, (5,)),), None)]
    assert sink.give([sequence], [6])[0] == [StepItem("a", 1, (Delta(0, (6,), "length"),), Outcome("length"))]


def test_choices_of_a_group_share_an_item_and_the_group_ends_with_the_last() -> None:
    sink = Sink()
    group = sink.group("a", n=2)
    [item], _ = sink.give(group.sequences, [EOS, 7])
    assert item == StepItem("a", 0, (Delta(0, (EOS,), "stop"), Delta(1, (7,))), None)
    [item], _ = sink.give(group.sequences[1:], [EOS])
    assert item == StepItem("a", 2, (Delta(1, (EOS,), "stop"),), Outcome("stop"))


def test_ranked_choices_leave_in_one_item_at_the_end_best_first() -> None:
    sink = Sink()
    group = sink.group("a", n=1, best_of=2, max_tokens=2, temperature=1.0)
    assert sink.give(group.sequences, [5, 6])[0] == []
    for sequence, logprob in zip(group.sequences, (-4.0, -2.0), strict=True):
        sequence.logprob = logprob
    [item], _ = sink.give(group.sequences, [7, 8])
    assert item == StepItem("a", 0, (Delta(0, (6, 8), "length", None, -1.0),), Outcome("length"))


def test_a_stop_string_ends_only_the_sequence_that_is_watched_for_it() -> None:
    sink = Sink()
    stops, other = sink.group("stops", stop=("fg",)), sink.group("other")
    assert list(sink.results.watched()) == stops.sequences
    sequences = [*stops.sequences, *other.sequences]
    sink.give(sequences, [5, 5])
    items, step = sink.give(sequences, [6, 6])
    assert items[0] == StepItem("stops", 1, (Delta(0, (6,), "stop", "fg"),), Outcome("stop"))
    assert items[1] == StepItem("other", 1, (Delta(0, (6,)),), None)
    assert step.ended == stops.sequences
    assert not list(sink.results.watched())


def test_a_forgotten_sequence_is_not_watched_any_more() -> None:
    sink = Sink()
    group = sink.group("a", stop=("fg",))
    sink.results.forget(group.sequences)
    assert not list(sink.results.watched())


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_ends_a_sequence_unless_it_is_ignored(ignore_eos: bool) -> None:
    sink = Sink()
    _, step = sink.give(sink.group("a", ignore_eos=ignore_eos).sequences, [EOS])
    assert bool(step.ended) is not ignore_eos


def test_the_results_of_a_beam_search_have_their_scores() -> None:
    assert best_beams([EndedBeam((1, EOS), -0.5, "stop"), EndedBeam((2,), -0.7, "length")]) == [
        Delta(0, (1, EOS), "stop", None, -0.5),
        Delta(1, (2,), "length", None, -0.7),
    ]


def test_a_stop_string_may_begin_with_the_space_between_the_prompt_and_the_first_word() -> None:
    words = byte_fallback().encode("the way", add_special_tokens=False).ids
    assert StopStringMatcher(byte_fallback(), (" the",)).push(words) == " the"


def test_a_stop_string_may_be_in_a_special_token_if_these_are_text() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False).ids
    assert StopStringMatcher(tokenizer, ("im_end",)).push(token_ids) is None
    assert StopStringMatcher(tokenizer, ("im_end",), skip_special_tokens=False).push(token_ids) == "im_end"


def test_sequences_are_watched_in_the_text_that_their_request_asks_for() -> None:
    sink = Sink()
    sink.results._tokenizer = byte_level()
    end = byte_level().token_to_id("<|im_end|>")
    for skips, expected in ((True, None), (False, "stop")):
        [sequence] = sink.group("a", stop=("_end",), skip_special_tokens=skips).sequences
        sink.results._ends(sequence, end, 1)
        assert sequence.finish_reason == expected
