"""Typed events: numbers, and errors that end the response or only its stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.api.responses.events import START, ResponseEvents
from quire.gateway.errors.api_errors import ApiError, Cancelled, DeadlinePassed, GenerationFailed
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.transcript import Choice

ABOUT = CallMetadata("response", 5, 1, False, (), 3, 1, False, echo='{"store":true}')
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
PARTS = [
    AnswerPart(PartKind.REASONING, "a"),
    AnswerPart(PartKind.CONTENT, "b\u2028"),
    AnswerPart(PartKind.CALL, "f", 0, "call_1"),
]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(str(model_folder), "", False)


def rendered(form: ResponseEvents) -> list[str]:
    events = form.opening()
    for part in PARTS:
        events += form.parts(0, [part])
    return [*events, *form.finish(0, "tool_calls"), *form.ending(USAGE)]


def data(event: str) -> Any:
    return json.loads(event.split("\ndata: ")[1])


def test_events_are_ascii_with_one_line_of_data(model: ServedModel) -> None:
    events = rendered(ResponseEvents("a" * 32, model, ABOUT))
    assert events[-1] == "data: [DONE]\n\n"
    for number, event in enumerate(events[:-1]):
        assert event.isascii()
        name, kind, line, *end = event.split("\n")
        assert (name, end) == (f"id: {number}", ["", ""])
        found = data(event)
        assert (found["sequence_number"], kind) == (number, f"event: {found['type']}")
        assert line.startswith("data: {")


def test_events_up_to_a_number_are_dropped(model: ServedModel) -> None:
    whole = rendered(ResponseEvents("a" * 32, model, ABOUT))
    for after in range(START, len(whole) - 1):
        assert rendered(ResponseEvents("a" * 32, model, ABOUT, after)) == whole[after + 1 :]


def test_the_last_event_has_the_whole_response(model: ServedModel) -> None:
    form = ResponseEvents("a" * 32, model, ABOUT)
    last = data(rendered(form)[-2])
    [whole] = ResponseEvents("a" * 32, model, ABOUT).full([Choice("", "tool_calls", parts=PARTS)], USAGE)
    assert last["response"] == json.loads(whole)


@pytest.mark.parametrize("error", [Cancelled("c"), DeadlinePassed("late"), GenerationFailed("broken")])
def test_an_error_of_the_call_ends_the_response(model: ServedModel, error: ApiError) -> None:
    form = ResponseEvents("a" * 32, model, ABOUT)
    form.parts(0, PARTS[:1])
    [event] = form.failure(error)
    found = data(event)
    assert found["type"] == "response.failed"
    assert found["response"]["output"][0]["status"] == "incomplete"


def test_an_error_of_the_gateway_ends_only_the_stream(model: ServedModel) -> None:
    form = ResponseEvents("a" * 32, model, ABOUT)
    opening = form.opening()
    [event] = form.failure(ApiError("Internal error.", code="internal"))
    assert data(event) == {
        "type": "error",
        "sequence_number": len(opening) - 1,  # of the event after which a client resumes
        "code": "internal",
        "message": "Internal error.",
        "param": None,
    }
