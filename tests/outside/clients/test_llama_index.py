"""`llama-index`: `OpenAILike` and `OpenAIResponses` answer with text, calls of functions and models, also streamed."""

from __future__ import annotations

import pytest

from tests.outside.clients.results import CITIES, assert_city, assert_forecast
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["llama-index-llms-openai-like==0.8.1", "llama-index-llms-openai==0.8.3", "openai==2.54.0"]
    return environments.run_python("llama_index_program.py", demo_url, requirements)


@APIS
@pytest.mark.parametrize("name", ["chat_with_tools", "streamed_tools"])
def test_a_tool_is_called(cases: dict[str, Case], api: str, name: str) -> None:
    result = cases[f"{api}_{name}"].value()
    assert result["name"] == "get_weather"
    assert_city(result["arguments"])


@APIS
def test_a_call_is_run(cases: dict[str, Case], api: str) -> None:
    assert cases[f"{api}_predict_and_call"].value() in [f"Sunny in {city}." for city in CITIES]


@APIS
def test_an_answer_is_a_model(cases: dict[str, Case], api: str) -> None:
    assert_forecast(cases[f"{api}_structured"].value())


@APIS
def test_a_streamed_text_is_equal_to_a_whole_one(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_streamed_text"].value()
    assert result["pieces"] > 3
    assert result["text"] == cases[f"{api}_text"].value() != ""
