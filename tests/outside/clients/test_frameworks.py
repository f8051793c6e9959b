"""Frameworks over the SDK `openai`, each in an environment of its own: tools, models as answers, streams."""

from __future__ import annotations

import pytest

from tests.outside.clients.results import CITIES, assert_city, assert_forecast, assert_same_vectors
from tests.outside.environments import Case, Environments

# --- langchain --------------------------------------------------------------------------------------------------------
# `langchain-openai` over chat completions and Responses, and its embeddings.


APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["langchain-openai==1.7.3", "langchain-core==1.7.2", "openai==3.54.0"]
    return environments.run_python("langchain_program.py", demo_url, requirements)


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_bound_tools_are_called_and_the_result_is_answered(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_bound_tools"].value()
    [call] = result["calls"]
    assert call["name"] == "GetWeather"
    assert_city(call["args"])
    assert not result["invalid"]
    assert result["answer"]


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_a_named_tool_is_called(cases: dict[str, Case], api: str) -> None:
    [call] = cases[f"{api}_named_tool"].value()
    assert call["name"] == "Forecast"
    assert_forecast(call["args"])


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_a_streamed_call_is_complete(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_streamed_tools"].value()
    [call] = result["calls"]
    assert_city(call["args"])
    assert result["chunks"] > 3


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_a_streamed_text_is_equal_to_a_whole_one(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_streamed_text"].value()
    assert result["chunks"] > 3
    assert result["text"] == cases[f"{api}_text"].value() == cases["chat_text"].value() != ""


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_is_a_model(cases: dict[str, Case], api: str, method: str) -> None:
    assert_forecast(cases[f"{api}_{method}"].value())


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_json_mode_gives_an_object(cases: dict[str, Case], api: str) -> None:
    assert isinstance(cases[f"{api}_json_mode"].value(), dict)


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_an_answer_with_a_schema_and_tools_is_a_call_or_a_model(cases: dict[str, Case], api: str) -> None:
    result = cases[f"{api}_schema_with_tools"].value()
    assert result["calls"]
    assert result["parsed"]
    for call in result["calls"]:
        assert_city(call["args"])
    for one in result["parsed"]:
        assert_forecast(one)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_conversation_that_the_server_keeps_goes_on(cases: dict[str, Case]) -> None:
    whole, kept = cases["kept_conversation"].value()
    assert whole == kept
    assert whole["text"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_embeddings_of_token_ids_are_those_of_their_texts(cases: dict[str, Case]) -> None:
    result = cases["embeddings"].value()
    assert_same_vectors(result["ids"], result["texts"])
    assert_same_vectors([result["query"]], result["texts"][:1])


# --- llama index ------------------------------------------------------------------------------------------------------
# `llama-index`: `OpenAILike` and `OpenAIResponses` answer with text, calls of functions and models, also streamed.


@pytest.fixture(scope="module")
def llama_index_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["llama-index-llms-openai-like==0.8.1", "llama-index-llms-openai==0.8.3", "openai==2.54.0"]
    return environments.run_python("llama_index_program.py", demo_url, requirements)


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
@pytest.mark.parametrize("name", ["chat_with_tools", "streamed_tools"])
def test_a_tool_is_called(llama_index_cases: dict[str, Case], api: str, name: str) -> None:
    result = llama_index_cases[f"{api}_{name}"].value()
    assert result["name"] == "get_weather"
    assert_city(result["arguments"])


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_a_call_is_run(llama_index_cases: dict[str, Case], api: str) -> None:
    assert llama_index_cases[f"{api}_predict_and_call"].value() in [f"Sunny in {city}." for city in CITIES]


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_an_answer_is_a_model(llama_index_cases: dict[str, Case], api: str) -> None:
    assert_forecast(llama_index_cases[f"{api}_structured"].value())


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_llama_index_a_streamed_text_is_equal_to_a_whole_one(llama_index_cases: dict[str, Case], api: str) -> None:
    result = llama_index_cases[f"{api}_streamed_text"].value()
    assert result["pieces"] > 3
    assert result["text"] == llama_index_cases[f"{api}_text"].value() != ""


# --- litellm ----------------------------------------------------------------------------------------------------------
# `litellm` over chat completions and Responses: tools, streams, answers by a JSON schema; and its embeddings.


@pytest.fixture(scope="module")
def litellm_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    # This version imports mcp when a call has tools, without requiring it.
    requirements = ["litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0"]
    return environments.run_python("litellm_program.py", demo_url, requirements)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_tool_is_called_and_the_message_sent_back(litellm_cases: dict[str, Case]) -> None:
    result = litellm_cases["tools"].value()
    assert result["call"]["name"] == "get_weather"
    assert_city(result["call"]["arguments"])
    assert result["answer"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_litellm_a_streamed_call_is_complete(litellm_cases: dict[str, Case]) -> None:
    result = litellm_cases["tools_streamed"].value()
    assert result["name"] == "get_weather"
    assert_city(result["arguments"])
    assert result["chunks"] > 3


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_litellm_an_answer_is_a_model(litellm_cases: dict[str, Case]) -> None:
    assert_forecast(litellm_cases["json_schema"].value())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_response_calls_a_tool_and_another_answers(litellm_cases: dict[str, Case]) -> None:
    """With all items in the request, and with those that the server keeps."""
    result = litellm_cases["response_tools"].value()
    assert result["name"] == "get_weather"
    assert_city(result["arguments"])
    whole, continued = result["answers"]
    assert whole == continued != ""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_streamed_response_is_equal_to_a_whole_one(litellm_cases: dict[str, Case]) -> None:
    result = litellm_cases["response_streamed"].value()
    assert result["delta"] == result["text"] == result["whole"] != ""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_response_is_a_model(litellm_cases: dict[str, Case]) -> None:
    assert_forecast(litellm_cases["response_parsed"].value())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_embeddings(litellm_cases: dict[str, Case]) -> None:
    result = litellm_cases["embeddings"].value()
    assert_same_vectors(result["default"], result["floats"])


# --- instructor -------------------------------------------------------------------------------------------------------
# `instructor`: models as answers, by tool calls (whole and streamed, also over Responses) and by JSON schemas.


@pytest.fixture(scope="module")
def instructor_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    return environments.run_python("instructor_program.py", demo_url, ["instructor==1.17.0", "openai==3.3.0"])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tools", "json_schema", "response_tools"])
def test_instructor_an_answer_is_a_model(instructor_cases: dict[str, Case], name: str) -> None:
    assert_forecast(instructor_cases[name].value())


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tools_streamed", "response_tools_streamed"])
def test_a_streamed_model_grows(instructor_cases: dict[str, Case], name: str) -> None:
    result = instructor_cases[name].value()
    assert result["pieces"] > 1
    assert_forecast(result["last"])


# --- pydantic ai ------------------------------------------------------------------------------------------------------
# `pydantic-ai` over chat completions and Responses.


@pytest.fixture(scope="module")
def pydantic_ai_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["pydantic-ai-slim[openai]==2.68.0", "openai==3.54.0"]
    return environments.run_python("pydantic_ai_program.py", demo_url, requirements)


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
@pytest.mark.parametrize("name", ["default_output", "native_output", "streamed_output", "streamed_native_output"])
def test_the_output_of_an_agent_is_a_model(pydantic_ai_cases: dict[str, Case], api: str, name: str) -> None:
    assert_forecast(pydantic_ai_cases[f"{api}_{name}"].value())


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_the_output_of_an_agent_is_text(pydantic_ai_cases: dict[str, Case], api: str) -> None:
    assert pydantic_ai_cases[f"{api}_text"].value()


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
@pytest.mark.parametrize("name", ["tools", "native_output_with_tools"])
def test_an_agent_calls_its_tool_and_then_answers(pydantic_ai_cases: dict[str, Case], api: str, name: str) -> None:
    result = pydantic_ai_cases[f"{api}_{name}"].value()
    assert result["called"]
    assert all(isinstance(days, bool) for days in result["called"])
    assert_forecast(result["output"])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["default_output", "native_output", "text", "tools", "native_output_with_tools"])
def test_both_apis_give_the_same_answer(pydantic_ai_cases: dict[str, Case], name: str) -> None:
    assert pydantic_ai_cases[f"chat_{name}"].value() == pydantic_ai_cases[f"responses_{name}"].value()


# --- openai agents ----------------------------------------------------------------------------------------------------
# `openai-agents` over Responses, its default, and chat completions: tools, output types, both, and a handoff.


@pytest.fixture(scope="module")
def agents_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    requirements = ["openai-agents==0.24.0", "openai==3.54.0"]
    return environments.run_python("openai_agents_program.py", demo_url, requirements)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_default_is_the_responses_api(agents_cases: dict[str, Case]) -> None:
    assert agents_cases["default_model"].value() == "OpenAIResponsesModel"


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
@pytest.mark.parametrize("name", ["tools", "tools_streamed"])
def test_agents_an_agent_calls_its_tool_and_then_answers(agents_cases: dict[str, Case], api: str, name: str) -> None:
    result = agents_cases[f"{api}_{name}"].value()
    assert result["called"]
    assert set(result["called"]) <= set(CITIES)
    assert result["output"]


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_a_streamed_run_is_equal_to_a_whole_one(agents_cases: dict[str, Case], api: str) -> None:
    streamed = agents_cases[f"{api}_tools_streamed"].value()
    assert streamed.pop("events") > 10
    assert streamed == agents_cases[f"{api}_tools"].value()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_both_apis_give_the_same_answers(agents_cases: dict[str, Case]) -> None:
    names = ("tools", "output_type", "output_type_with_tools", "handoff")
    assert [agents_cases[f"responses_{name}"].value() for name in names] == [
        agents_cases[f"chat_{name}"].value() for name in names
    ]


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_agents_the_output_of_an_agent_is_a_model(agents_cases: dict[str, Case], api: str) -> None:
    assert_forecast(agents_cases[f"{api}_output_type"].value())


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_an_agent_with_a_tool_and_an_output_type_uses_both(agents_cases: dict[str, Case], api: str) -> None:
    result = agents_cases[f"{api}_output_type_with_tools"].value()
    assert result["called"]
    assert set(result["called"]) <= set(CITIES)
    assert_forecast(result["output"])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_agents_a_conversation_that_the_server_keeps_goes_on(agents_cases: dict[str, Case]) -> None:
    whole, kept = agents_cases["kept_conversation"].value()
    assert whole == kept != ""


@pytest.mark.soak
@pytest.mark.timeout(900)
@APIS
def test_an_agent_hands_over_to_another_one(agents_cases: dict[str, Case], api: str) -> None:
    result = agents_cases[f"{api}_handoff"].value()
    assert result["last_agent"] == "Expert"
    assert result["output"]
