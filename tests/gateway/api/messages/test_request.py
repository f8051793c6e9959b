"""Bodies of message calls become conversations and options, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.messages.parameters import COUNT_TOKENS, CREATE
from quire.gateway.api.messages.request import MessageRequest, read_request
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.output.tools import ToolMode
from quire.shared.sampling_params import MODEL_DEFAULTS
from tests.support.gateway.agents import WEATHER, body

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
CONTINUED = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I"}]


@pytest.fixture(scope="module")
def model(agent_model: Any) -> ServedModel:
    return load_model(str(agent_model), "test-model")


@pytest.fixture(scope="module")
def plain_model(model_folder: Any) -> ServedModel:
    """A model whose chat template knows neither tools nor reasoning."""
    return load_model(str(model_folder), "test-model")


def read(model: ServedModel, /, **parameters: Any) -> MessageRequest:
    return read_request(body(**parameters), CREATE, model)


def test_the_options_of_a_call(model: ServedModel) -> None:
    request = read(model, stop_sequences=["END"], temperature=0.5, stream=True, priority="batch", output_format=FORMAT)
    options = request.options(MODEL_DEFAULTS)
    assert options.sampling.stop == ("END",)
    assert options.sampling.temperature == 0.5
    assert (options.stream, options.priority, options.max_tokens) == (True, "batch", None)
    assert '"integer"' in options.sampling.grammar
    assert options.grammar_parameter == "output_format.schema"


def test_the_system_prompt_comes_first(model: ServedModel) -> None:
    request = read(model, system=[{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}])
    assert [message["role"] for message in request.conversation.messages] == ["system", "user"]


def test_two_system_prompts_at_the_beginning_are_one_message(model: ServedModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    request = read(model, system="Be kind.", messages=messages)
    assert request.conversation.messages[0]["content"] == [
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": "Be brief."},
    ]


def test_a_choice_of_tools(model: ServedModel) -> None:
    request = read(model, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    assert request.conversation.tool_choice.mode == ToolMode.NAMED
    assert request.no_effect == ()


THINKING = [
    ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True, "thinking": True, "thinking_budget": 1024}),
    ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True}),
    ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
]


@pytest.mark.parametrize(("thinking", "variables"), THINKING)
def test_the_variables_of_the_template(model: ServedModel, thinking: Any, variables: Any) -> None:
    request = read(model, thinking=thinking, output_config={"effort": "max"})
    assert request.conversation.template_variables == {**variables, "reasoning_effort": "high"}


def test_what_the_template_does_not_know_has_no_effect(model: ServedModel, plain_model: ServedModel) -> None:
    asked: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}}
    assert read(model, **asked).no_effect == ("thinking.budget_tokens",)
    assert read(plain_model, **asked).no_effect == ("thinking", "thinking.budget_tokens", "output_config.effort")


def test_what_has_no_effect_is_named_once(model: ServedModel) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    request = read(model, tools=[search, {**WEATHER, "defer_loading": True}], diagnostics={}, workspace_id="w")
    assert request.no_effect == ("diagnostics", "workspace_id", "tools.web_search_20250305", "tools.defer_loading")
    assert request.options(MODEL_DEFAULTS).labels.no_effect == request.no_effect


def test_old_thinking_is_cleared_if_the_call_asks_for_it(model: ServedModel) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}
    user = {"role": "user", "content": "Go on."}
    messages = [user, said, user, said, user]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}
    request = read(model, messages=messages, context_management=edits)
    assert ["reasoning_content" in message for message in request.conversation.messages] == [
        *(False, False, False),
        *(True, False),
    ]


def test_the_answer_continues_a_last_message_of_the_assistant(model: ServedModel) -> None:
    for messages, continues in ((CONTINUED, True), (CONTINUED[:1], False)):
        options = read(model, messages=messages).options(MODEL_DEFAULTS)
        assert options.form.continue_final_message is continues
        assert options.form.add_generation_prompt is not continues


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
    "no model": ({"model": None}, "model", "missing_required_parameter"),
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "messages without content": ({"messages": [{"role": "assistant", "content": []}]}, "messages", "invalid_value"),
    "unknown parameter": ({"wisdom": 1}, "wisdom", "unknown_parameter"),
    "a parameter of OpenAI": ({"frequency_penalty": 1}, "frequency_penalty", "unknown_parameter"),
    "a container": ({"container": "c"}, "container", "unsupported_parameter"),
    "servers of tools": ({"mcp_servers": [{}]}, "mcp_servers", "unsupported_parameter"),
    "a place": ({"inference_geo": "eu"}, "inference_geo", "unsupported_parameter"),
    "a new thread": ({"thread": {"type": "create"}}, "thread", "thread_unsupported_request"),
    "fast": ({"speed": "fast"}, "speed", "unsupported_parameter"),
    "background without stream": ({"background": True}, "background", "invalid_value"),
    "tier and priority": ({"service_tier": "standard_only", "priority": "batch"}, "service_tier", "invalid_value"),
    "two formats": (
        {"output_format": FORMAT, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        "output_format",
        "invalid_value",
    ),
    "continuation and format": (
        {"messages": CONTINUED, "output_format": FORMAT},
        "output_config.format",
        "invalid_value",
    ),
    "continuation and a forced tool": (
        {"messages": CONTINUED, "tools": [WEATHER], "tool_choice": {"type": "any"}},
        "tool_choice",
        "invalid_value",
    ),
    "a tool use without its result": (
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
            ]
        },
        "messages",
        "invalid_value",
    ),
}


@pytest.mark.parametrize(("parameters", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_bodies_that_are_refused(model: ServedModel, parameters: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(model, **parameters).options(MODEL_DEFAULTS)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


@pytest.mark.parametrize(
    "neutral", [{"speed": "standard"}, {"mcp_servers": []}, {"container": None}, {"fallbacks": []}]
)
def test_values_that_ask_for_nothing_are_accepted(model: ServedModel, neutral: Any) -> None:
    assert read(model, **neutral).no_effect == ()


def test_a_count_has_no_parameters_of_the_answer(model: ServedModel) -> None:
    asked = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}], "tools": [WEATHER]}
    assert len(read_request(asked, COUNT_TOKENS, model).conversation.tools) == 1
    with pytest.raises(ApiError) as caught:
        read_request({**asked, "max_tokens": 5}, COUNT_TOKENS, model)
    assert caught.value.param == "max_tokens"


def test_an_error_about_a_schema_names_the_place_in_this_body(model: ServedModel) -> None:
    request = read(model, tools=[{"type": "web_search_20250305"}, WEATHER])
    chat = ApiError("tools[0].function.parameters is wrong.", param="tools[0].function.parameters")
    renamed = request.renamed(chat)
    assert renamed.param == "tools[1].input_schema"
    assert renamed.message == "tools[1].input_schema is wrong."
    other = ApiError("x", param="tools")
    assert request.renamed(other) is other
