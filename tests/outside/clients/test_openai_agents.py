"""`openai-agents` over Responses, its default, and chat completions: tools, output types, both, and a handoff."""

from __future__ import annotations

import pytest

from tests.outside.clients.results import CITIES, assert_forecast
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
APIS = pytest.mark.parametrize("api", ["responses", "chat"])


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["openai-agents==0.24.0", "openai==3.54.0"]
    return environments.run_python("openai_agents_program.py", demo_url, requirements)


def test_the_default_is_the_responses_api(cases: dict[str, Case]) -> None:
    assert cases["default_model"].value() == "OpenAIResponsesModel"


@APIS
@pytest.mark.parametrize("name", ["tools", "tools_streamed"])
def test_an_agent_calls_its_tool_and_then_answers(cases: dict[str, Case], api: str, name: str) -> None:
    result = cases[f"{api}_{name}"].value()
    assert result["called"]
    assert set(result["called"]) <= set(CITIES)
    assert result["output"]


@APIS
def test_a_streamed_run_is_equal_to_a_whole_one(cases: dict[str, Case], api: str) -> None:
    streamed = cases[f"{api}_tools_streamed"].value()
    assert streamed.pop("events") > 10
    assert streamed == cases[f"{api}_tools"].value()


def test_both_apis_give_the_same_answers(cases: dict[str, Case]) -> None:
    names = ("tools", "output_type", "output_type_with_tools", "handoff")
    assert [cases[f"responses_{name}"].value() for name in names] == [cases[f"chat_{name}"].value() for name in names]


@APIS
def test_the_output_of_an_agent_is_a_model(cases: dict[str, Case], api: str) -> None:
    assert_forecast(cases[f"{api}_output_type"].value())


@APIS
def test_an_agent_with_a_tool_and_an_output_type_uses_both(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_output_type_with_tools"].value()
    assert result["called"]
    assert set(result["called"]) <= set(CITIES)
    assert_forecast(result["output"])


def test_a_conversation_that_the_server_keeps_goes_on(cases: dict[str, Case]) -> None:
    whole, kept = cases["kept_conversation"].value()
    assert whole == kept != ""


@APIS
def test_an_agent_hands_over_to_another_one(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_handoff"].value()
    assert result["last_agent"] == "Expert"
    assert result["output"]
