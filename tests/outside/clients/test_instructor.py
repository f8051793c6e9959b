"""`instructor`: models as answers, by tool calls (whole and streamed, also over Responses) and by JSON schemas."""

from __future__ import annotations

import pytest

from tests.outside.clients.results import assert_forecast
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    return environments.run_python("instructor_program.py", demo_url, ["instructor==1.17.0", "openai==3.3.0"])


@pytest.mark.parametrize("name", ["tools", "json_schema", "response_tools"])
def test_an_answer_is_a_model(cases: dict[str, Case], name: str) -> None:
    assert_forecast(cases[name].value())


@pytest.mark.parametrize("name", ["tools_streamed", "response_tools_streamed"])
def test_a_streamed_model_grows(cases: dict[str, Case], name: str) -> None:
    result = cases[name].value()
    assert result["pieces"] > 1
    assert_forecast(result["last"])
