"""A transcript is the text of a call: choices and tokens are counted over its requests, and a failure ends it."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from quire.gateway.errors import api_errors
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.stream.answer_options import AnswerOptions
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.transcript import Choice, TextDelta, Transcript
from quire.shared.messages import Delta, Outcome, StepItem
from tests.support.gateway.running import MODEL, tokens

COMPLETION = CallMetadata("completion", 0, 1, True, (), 3, 1, False)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(str(model_folder), MODEL)


def item(request_id: str, start: int, text: str, choice: int = 0, reason: str | None = None) -> StepItem:
    outcome = Outcome(reason) if reason else None
    return StepItem(request_id, start, (Delta(choice, tuple(tokens(text)), reason),), outcome)


def test_choices_and_positions_are_those_of_the_call(model: ServedModel) -> None:
    """The second request's choice follows those of the first, and its tokens are counted with them."""
    transcript = Transcript(replace(COMPLETION, n=2, requests=2), model, ["a", "b"])
    assert transcript.feed(item("a", 0, "abc", choice=1)) == [TextDelta(1, "abc", "", None, 3)]
    assert transcript.feed(item("b", 0, "de")) == [TextDelta(2, "de", "", None, 5)]
    assert transcript.feed(item("a", 3, "f")) == [TextDelta(0, "f", "", None, 6)]
    assert transcript.usage == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert not transcript.ended


def test_the_end_of_a_request_ends_its_choices_and_that_of_all_the_call(model: ServedModel) -> None:
    transcript = Transcript(replace(COMPLETION, requests=2), model, ["a", "b"])
    assert transcript.feed(item("a", 0, "x", reason="stop")) == [TextDelta(0, "x", "", "stop", 1)]
    assert not transcript.ended
    # A choice without a finish reason of its own gets that of the request.
    assert transcript.feed(StepItem("b", 0, (), Outcome("length"))) == [TextDelta(1, "", "", "length", 1)]
    assert transcript.ended
    assert transcript.finish_reasons == ["stop", "length"]
    assert transcript.error is None


def test_text_that_may_become_a_stop_string_is_held_back(model: ServedModel) -> None:
    transcript = Transcript(replace(COMPLETION, stop=("<end>",)), model, ["a"])
    assert transcript.feed(item("a", 0, "one <e")) == [TextDelta(0, "one ", "", None, 6)]
    [delta] = transcript.feed(StepItem("a", 6, (Delta(0, tuple(tokens("x")), "length"),), Outcome("length")))
    assert (delta.text + delta.rest, delta.finish_reason) == ("<ex", "length")


@pytest.mark.parametrize(
    ("outcome", "error", "status", "code"),
    [
        ("cancelled", api_errors.Cancelled, 499, "cancelled"),
        ("deadline", api_errors.DeadlinePassed, 504, "deadline_exceeded"),
        ("error", api_errors.GenerationFailed, 500, "generation_failed"),
        ("quarantined", api_errors.GenerationFailed, 500, "quarantined"),
    ],
)
def test_a_failure_ends_the_call_with_its_error(
    model: ServedModel, outcome: str, error: type[api_errors.ApiError], status: int, code: str
) -> None:
    transcript = Transcript(replace(COMPLETION, requests=2), model, ["a", "b"])
    transcript.feed(StepItem("b", 0, (), Outcome(outcome, "the reason")))
    assert transcript.ended
    assert type(transcript.error) is error
    assert (transcript.error.status, transcript.error.code, str(transcript.error)) == (status, code, "the reason")
    # A request that ends well afterwards does not hide it.
    transcript.feed(item("a", 0, "x", reason="stop"))
    assert transcript.outcome == Outcome(outcome, "the reason")
    assert transcript.error is not None


def test_tokens_with_log_probabilities_know_where_they_begin(model: ServedModel) -> None:
    records = b"".join(struct.pack("<f", -index) for index in range(3))
    transcript = Transcript(COMPLETION, model, ["a"])
    [delta] = transcript.feed(StepItem("a", 0, (Delta(0, tuple(tokens("abc")), logprobs=records),)))
    assert delta.logprobs == ScoredTokens(tuple(tokens("abc")), records, (0, 1, 2))
    assert [row.logprob for _, row in delta.logprobs.rows()] == [0, -1, -2]
    assert ScoredTokens.join([delta.logprobs, delta.logprobs]).offsets == (0, 1, 2, 0, 1, 2)


def test_a_score_is_a_field_of_its_choice() -> None:
    assert Choice("", "stop").ranking == ""
    assert Choice("", "stop", -0.5).ranking == ',"score":-0.5'


@pytest.mark.parametrize(
    ("dialect", "continues", "text"),
    [("chat", False, "a"), ("message", False, "a"), ("message", True, " a"), ("completion", False, " a")],
)
def test_only_a_text_of_its_own_loses_its_first_space(
    model: ServedModel, dialect: str, continues: bool, text: str
) -> None:
    metadata = replace(COMPLETION, dialect=dialect, answer=AnswerOptions(continues_message=continues))
    transcript = Transcript(metadata, replace(model, drops_first_space=True), ["a"])
    deltas = transcript.feed(item("a", 0, " a", reason="stop"))
    assert "".join(delta.text + delta.rest for delta in deltas) == text
