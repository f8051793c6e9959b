"""npm: the package `openai` (chat, Responses, embeddings), and `ai` with its providers.

The providers are those for OpenAI (Responses, its default, and chat), compatible servers and the Messages API.
"""

from __future__ import annotations

import pytest

from tests.outside.clients.results import assert_city, assert_same_vectors
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
PACKAGES = [
    "openai@6.49.0",
    "zod@4.6.7",
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@ai-sdk/anthropic@3.0.140",
]
PROVIDERS = ["responses", "openai", "compatible", "anthropic"]


@pytest.fixture(scope="module")
def openai_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    return environments.run_node("openai.mjs", demo_url, PACKAGES)


@pytest.fixture(scope="module")
def responses_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    return environments.run_node("openai_responses.mjs", demo_url, PACKAGES)


@pytest.fixture(scope="module")
def ai_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    return environments.run_node("ai_sdk.mjs", demo_url, PACKAGES)


def test_openai_calls_a_tool_and_answers(openai_cases: dict[str, Case]) -> None:
    result = openai_cases["tools"].value()
    assert result["function"]["name"] == "get_weather"
    assert_city(result["function"]["arguments"])
    assert result["answer"]


def test_openai_streams_a_call(openai_cases: dict[str, Case]) -> None:
    result = openai_cases["streamed"].value()
    assert result["finish_reason"] == "tool_calls"
    assert result["chunks"] > 3
    assert_city(result["function"]["parsed_arguments"])


def test_openai_parses_an_answer(openai_cases: dict[str, Case]) -> None:
    assert_city(openai_cases["parsed"].value())


def test_openai_runs_tools(openai_cases: dict[str, Case]) -> None:
    result = openai_cases["runTools"].value()
    assert result["called"]
    for arguments in result["called"]:
        assert_city(arguments)


def test_openai_creates_a_response_and_reads_it_again(responses_cases: dict[str, Case]) -> None:
    result = responses_cases["text"].value()
    assert result["status"] == "completed"
    assert result["text"] == result["stored"] != ""


def test_openai_streams_a_response(responses_cases: dict[str, Case]) -> None:
    result = responses_cases["streamed"].value()
    assert result["numbers"] == list(range(len(result["numbers"])))
    assert result["delta"] == result["text"] == responses_cases["text"].value()["text"]


def test_openai_answers_the_result_of_a_call_in_a_response(responses_cases: dict[str, Case]) -> None:
    """With all items in the request, and with those that the server keeps."""
    result = responses_cases["tools"].value()
    assert result["name"] == "get_weather"
    assert_city(result["arguments"])
    whole, continued = result["answers"]
    assert whole == continued != ""


def test_openai_streams_a_call_of_a_response(responses_cases: dict[str, Case]) -> None:
    result = responses_cases["tools_streamed"].value()
    assert result["pieces"] > 3
    assert_city(result["parsed"])


@pytest.mark.parametrize("name", ["parsed", "parsed_call"])
def test_openai_parses_a_response(responses_cases: dict[str, Case], name: str) -> None:
    assert_city(responses_cases[name].value())


def test_openai_reads_a_response_in_the_background_from_any_event_on(responses_cases: dict[str, Case]) -> None:
    result = responses_cases["background"].value()
    assert result["whole"] == list(range(len(result["whole"])))
    assert result["rest"] == result["whole"][result["middle"] + 1 :] != []


def test_openai_gets_embeddings(responses_cases: dict[str, Case]) -> None:
    result = responses_cases["embeddings"].value()
    assert len(result["decoded"]) == 2
    assert result["tokens"] > 2
    assert_same_vectors(result["decoded"], result["floats"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_calls_a_tool_and_answers(ai_cases: dict[str, Case], provider: str) -> None:
    result = ai_cases[f"{provider}_tools"].value()
    assert result["called"]
    for arguments in result["called"]:
        assert_city(arguments)
    assert result["text"]
    assert result["finish_reasons"][0] == "tool-calls"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_streams_a_call_and_an_answer(ai_cases: dict[str, Case], provider: str) -> None:
    result = ai_cases[f"{provider}_tools_streamed"].value()
    for arguments in result["called"]:
        assert_city(arguments)
    assert {"tool-input-start", "tool-input-delta", "tool-call", "tool-result", "text-delta"} <= set(result["kinds"])
    assert result["text"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_gives_an_object(ai_cases: dict[str, Case], provider: str) -> None:
    assert_city(ai_cases[f"{provider}_output"].value())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_streams_an_object(ai_cases: dict[str, Case], provider: str) -> None:
    result = ai_cases[f"{provider}_output_streamed"].value()
    assert result["partial"] > 1
    assert len(result["cities"]) == 8
    for city in result["cities"]:
        assert_city({"city": city})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_calls_a_tool_and_then_gives_an_object(ai_cases: dict[str, Case], provider: str) -> None:
    result = ai_cases[f"{provider}_output_with_tools"].value()
    assert result["called"]
    for arguments in [*result["called"], result["output"]]:
        assert_city(arguments)
