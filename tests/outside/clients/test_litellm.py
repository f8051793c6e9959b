"""`litellm` over chat completions and Responses: tools, streams, answers by a JSON schema; and its embeddings."""

from __future__ import annotations

import pytest

from tests.outside.clients.results import assert_city, assert_forecast, assert_same_vectors
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    # This version imports mcp when a call has tools, without requiring it.
    requirements = ["litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0"]
    return environments.run_python("litellm_program.py", demo_url, requirements)


def test_a_tool_is_called_and_the_message_sent_back(cases: dict[str, Case]) -> None:
    result = cases["tools"].value()
    assert result["call"]["name"] == "get_weather"
    assert_city(result["call"]["arguments"])
    assert result["answer"]


def test_a_streamed_call_is_complete(cases: dict[str, Case]) -> None:
    result = cases["tools_streamed"].value()
    assert result["name"] == "get_weather"
    assert_city(result["arguments"])
    assert result["chunks"] > 3


def test_an_answer_is_a_model(cases: dict[str, Case]) -> None:
    assert_forecast(cases["json_schema"].value())


def test_a_response_calls_a_tool_and_another_answers(cases: dict[str, Case]) -> None:
    """With all items in the request, and with those that the server keeps."""
    result = cases["response_tools"].value()
    assert result["name"] == "get_weather"
    assert_city(result["arguments"])
    whole, continued = result["answers"]
    assert whole == continued != ""


def test_a_streamed_response_is_equal_to_a_whole_one(cases: dict[str, Case]) -> None:
    result = cases["response_streamed"].value()
    assert result["delta"] == result["text"] == result["whole"] != ""


def test_a_response_is_a_model(cases: dict[str, Case]) -> None:
    assert_forecast(cases["response_parsed"].value())


def test_embeddings(cases: dict[str, Case]) -> None:
    result = cases["embeddings"].value()
    assert_same_vectors(result["default"], result["floats"])
