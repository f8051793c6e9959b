"""`pydantic-ai` over chat completions and Responses.

Agents with the default output type and with output by a JSON schema, both with tools, and streams.
"""

from __future__ import annotations

import pytest

from tests.outside.clients.results import assert_forecast
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["pydantic-ai-slim[openai]==2.68.0", "openai==3.54.0"]
    return environments.run_python("pydantic_ai_program.py", demo_url, requirements)


@APIS
@pytest.mark.parametrize("name", ["default_output", "native_output", "streamed_output", "streamed_native_output"])
def test_the_output_of_an_agent_is_a_model(cases: dict[str, Case], api: str, name: str) -> None:
    assert_forecast(cases[f"{api}_{name}"].value())


@APIS
def test_the_output_of_an_agent_is_text(cases: dict[str, Case], api: str) -> None:
    assert cases[f"{api}_text"].value()


@APIS
@pytest.mark.parametrize("name", ["tools", "native_output_with_tools"])
def test_an_agent_calls_its_tool_and_then_answers(cases: dict[str, Case], api: str, name: str) -> None:
    result = cases[f"{api}_{name}"].value()
    assert result["called"]
    assert all(isinstance(days, bool) for days in result["called"])
    assert_forecast(result["output"])


@pytest.mark.parametrize("name", ["default_output", "native_output", "text", "tools", "native_output_with_tools"])
def test_both_apis_give_the_same_answer(cases: dict[str, Case], name: str) -> None:
    assert cases[f"chat_{name}"].value() == cases[f"responses_{name}"].value()
