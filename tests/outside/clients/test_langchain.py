"""`langchain-openai` over chat completions and Responses, and its embeddings.

`bind_tools`, streams, `with_structured_output` in its three methods, and a schema together with tools.
"""

from __future__ import annotations

import pytest

from tests.outside.clients.results import assert_city, assert_forecast, assert_same_vectors
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["langchain-openai==1.7.3", "langchain-core==1.7.2", "openai==3.54.0"]
    return environments.run_python("langchain_program.py", demo_url, requirements)


@APIS
def test_bound_tools_are_called_and_the_result_is_answered(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_bound_tools"].value()
    [call] = result["calls"]
    assert call["name"] == "GetWeather"
    assert_city(call["args"])
    assert not result["invalid"]
    assert result["answer"]


@APIS
def test_a_named_tool_is_called(cases: dict[str, Case], api: str) -> None:
    [call] = cases[f"{api}_named_tool"].value()
    assert call["name"] == "Forecast"
    assert_forecast(call["args"])


@APIS
def test_a_streamed_call_is_complete(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_streamed_tools"].value()
    [call] = result["calls"]
    assert_city(call["args"])
    assert result["chunks"] > 3


@APIS
def test_a_streamed_text_is_equal_to_a_whole_one(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_streamed_text"].value()
    assert result["chunks"] > 3
    assert result["text"] == cases[f"{api}_text"].value() == cases["chat_text"].value() != ""


@APIS
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_is_a_model(cases: dict[str, Case], api: str, method: str) -> None:
    assert_forecast(cases[f"{api}_{method}"].value())


@APIS
def test_json_mode_gives_an_object(cases: dict[str, Case], api: str) -> None:
    assert isinstance(cases[f"{api}_json_mode"].value(), dict)


@APIS
def test_an_answer_with_a_schema_and_tools_is_a_call_or_a_model(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_schema_with_tools"].value()
    assert result["calls"]
    assert result["parsed"]
    for call in result["calls"]:
        assert_city(call["args"])
    for one in result["parsed"]:
        assert_forecast(one)


def test_a_conversation_that_the_server_keeps_goes_on(cases: dict[str, Case]) -> None:
    whole, kept = cases["kept_conversation"].value()
    assert whole == kept
    assert whole["text"]


def test_embeddings_of_token_ids_are_those_of_their_texts(cases: dict[str, Case]) -> None:
    result = cases["embeddings"].value()
    assert_same_vectors(result["ids"], result["texts"])
    assert_same_vectors([result["query"]], result["texts"][:1])
