"""The Response object in each status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.gateway.api.responses.body import ResponseBody, ResponseStatus, is_stored
from quire.gateway.api.responses.output_items import OutputItems
from quire.gateway.errors.api_errors import ApiError, Cancelled, DeadlinePassed, GenerationFailed
from quire.gateway.model.served_model import ServedModel
from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream.call_metadata import CallMetadata
from tests.support.gateway.running import MODEL
from tests.support.tokenizers import byte_level

ABOUT = CallMetadata("response", 5, 1, False, (), 3, 1, False, echo='{"store":true,"user":null}')
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.fixture
def output() -> OutputItems:
    output = OutputItems("a", TokenTexts(byte_level()))
    list(output.push([AnswerPart(PartKind.CONTENT, "x")]))
    return output


@pytest.fixture
def body() -> ResponseBody:
    class Named:
        name = MODEL

    model: Any = Named()
    served: ServedModel = model
    return ResponseBody("a", served, ABOUT)


def test_a_running_response(body: ResponseBody, output: OutputItems) -> None:
    queued = json.loads(body.running(ResponseStatus.QUEUED))
    assert (queued["id"], queued["created_at"], queued["status"], queued["output"]) == ("resp_a", 5, "queued", [])
    assert (queued["store"], queued["user"], queued["usage"]) == (True, None, None)
    running = json.loads(body.running(ResponseStatus.IN_PROGRESS, output))
    assert running["output"][0]["status"] == "in_progress"


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [("stop", "completed", None), ("tool_calls", "completed", None), ("length", "incomplete", "max_output_tokens")],
)
def test_an_ended_response(
    body: ResponseBody, output: OutputItems, reason: str, status: str, details: str | None
) -> None:
    list(output.finish(reason))
    ended = json.loads(body.ended(output, USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}))
    assert (ended["status"], ended["error"]) == (status, None)
    assert ended["incomplete_details"] == (details and {"reason": details})
    assert ended["usage"]["input_tokens_details"] == {"cached_tokens": 1, "cache_write_tokens": 0}
    assert (ended["usage"]["input_tokens"], ended["usage"]["output_tokens"]) == (3, 2)


@pytest.mark.parametrize("error", [Cancelled("c"), DeadlinePassed("late"), GenerationFailed("broken")])
def test_a_failed_response(body: ResponseBody, output: OutputItems, error: ApiError) -> None:
    output.fail()
    failed = json.loads(body.failed(output, error))
    is_cancelled = isinstance(error, Cancelled)
    assert failed["status"] == ("cancelled" if is_cancelled else "failed")
    assert failed["error"] == (None if is_cancelled else {"code": "server_error", "message": error.message})
    assert failed["output"][0]["status"] == "incomplete"


def test_the_metadata_tells_whether_a_response_is_stored() -> None:
    assert is_stored(ABOUT)
