"""Requests of the Messages API: what is read, refused by name, or without effect."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api.messages.client_tools import client_tool
from quire.gateway.api.messages.content import (
    BILLING_LABEL,
    ERROR_MARK,
    check_cache_control,
    clear_thinking,
    read_messages,
    read_system,
)
from quire.gateway.api.messages.parameters import ALL, COUNT_TOKENS, CREATE
from quire.gateway.api.messages.request import MessageRequest, read_request
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.model.served_model import ServedModel, load_model
from quire.shared.config.validators import InvalidValue
from quire.shared.protocol.sampling_params import MODEL_DEFAULTS
from tests.support.gateway.agents import WEATHER, body

# --- Bodies of message calls become conversations and options, or are refused by name ---------------------------------


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
    call = request.call(MODEL_DEFAULTS)
    assert call.common.stop == ("END",)
    assert call.common.temperature == 0.5
    assert (call.stream, call.priority, call.max_tokens) == (True, "batch", None)
    assert '"integer"' in call.common.grammar
    assert call.grammar_parameter == "output_format.schema"


def test_two_system_prompts_at_the_beginning_are_one_message(model: ServedModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    request = read(model, system="Be kind.", messages=messages)
    assert request.conversation.messages[0]["content"] == [
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": "Be brief."},
    ]


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


def test_a_budget_bounds_the_reasoning_of_an_answer_that_begins_a_message(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks that end the reasoning are one token each. An effort is no form of the answer."""
    monkeypatch.setattr(ServedModel, "thinking_markers", lambda self, prompt, is_free: ((), (7,) if is_free else ()))
    asked: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    user = {"role": "user", "content": "Hello"}
    bounded = read(model, **asked, output_config={"effort": "low"}, messages=[user])
    assert bounded.call(MODEL_DEFAULTS).common.thinking_token_budget == 1024
    continued = read(model, **asked, messages=[user, {"role": "assistant", "content": "It is"}])
    assert continued.call(MODEL_DEFAULTS).common.thinking_token_budget == -1
    assert "thinking.budget_tokens" in continued.no_effect


def test_what_has_no_effect_is_named_once(model: ServedModel) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    request = read(model, tools=[search, {**WEATHER, "defer_loading": True}], diagnostics={}, workspace_id="w")
    assert request.no_effect == ("diagnostics", "workspace_id", "tools.web_search_20250305", "tools.defer_loading")
    assert request.call(MODEL_DEFAULTS).no_effect == request.no_effect


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


REQUEST_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
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


@pytest.mark.parametrize(("parameters", "param", "code"), REQUEST_REFUSED.values(), ids=REQUEST_REFUSED)
def test_bodies_that_are_refused(model: ServedModel, parameters: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(model, **parameters).call(MODEL_DEFAULTS)
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


# --- Blocks of the Messages API become messages of a chat template, or are refused by name ----------------------------


TEXT = {"type": "text", "text": "Hello"}
CACHED = {"type": "ephemeral", "ttl": "1h"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool_use(id_: str = "toolu_1", name: str = "read", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def tool_result(content: Any = "done", id_: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **more}


def test_a_string_and_one_text_block_are_the_same() -> None:
    expected = [{"role": "user", "content": "Hello"}]
    assert read_messages([{"role": "user", "content": "Hello"}], []) == expected
    assert read_messages([user({**TEXT, "cache_control": CACHED})], []) == expected


def test_neighbouring_messages_of_one_speaker_are_one_message() -> None:
    messages = [user(TEXT), {"role": "user", "content": "again"}, assistant(TEXT), assistant(tool_use(path="x"))]
    assert read_messages(messages, []) == [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "again"}]},
        {
            "role": "assistant",
            "content": "Hello",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "read", "arguments": {"path": "x"}}}
            ],
        },
    ]


def test_tool_results_are_messages_of_their_own_in_the_order_of_the_blocks() -> None:
    messages = [
        user(TEXT),
        assistant(tool_use("a", "read"), tool_use("b", "list")),
        user(
            tool_result("one", "a"),
            tool_result([TEXT, {"type": "text", "text": "two"}], "b"),
            {"type": "text", "text": "go on"},
        ),
    ]
    assert read_messages(messages, [])[2:] == [
        {"role": "tool", "tool_call_id": "a", "name": "read", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "name": "list", "content": "Hello\ntwo"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (tool_result(None), ""),
        (tool_result([]), ""),
        (tool_result("no such file", is_error=True), ERROR_MARK + "no such file"),
        (tool_result("fine", is_error=False), "fine"),
        (tool_result([{"type": "tool_reference", "tool_name": "list"}]), "list"),
    ],
)
def test_the_content_of_a_tool_result(block: dict[str, Any], content: str) -> None:
    assert read_messages([user(block)], []) == [{"role": "tool", "tool_call_id": "toolu_1", "content": content}]


def test_thinking_is_the_reasoning_of_a_message() -> None:
    no_effect: list[str] = []
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "sha256-0"}
    redacted = {"type": "redacted_thinking", "data": "secret"}
    [message] = read_messages([assistant(thought, {**thought, "thinking": "Yes."}, redacted, TEXT)], no_effect)
    assert message == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm.\nYes."}
    assert no_effect == ["redacted_thinking"]


def test_an_assistant_message_without_anything_is_left_out() -> None:
    assert read_messages([user(TEXT), assistant()], []) == [{"role": "user", "content": "Hello"}]
    assert len(read_messages([user(TEXT), assistant(tool_use())], [])) == 2


def test_old_thinking_is_cleared() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [assistant(thought, TEXT), user(TEXT), assistant(TEXT), user(TEXT), assistant(thought, TEXT)]
    messages = read_messages(turns, [])
    assert ["reasoning_content" in message for message in clear_thinking(messages, 1)] == [False] * 4 + [True]
    assert clear_thinking(messages, 2) == messages
    assert all("reasoning_content" not in message for message in clear_thinking(messages, 0))


def test_the_system_prompt_has_no_billing_label() -> None:
    no_effect: list[str] = []
    label = {"type": "text", "text": f"{BILLING_LABEL} cc_version=2.1; cch=fa690;"}
    assert read_system([label, TEXT], no_effect) == [{"role": "system", "content": "Hello"}]
    assert no_effect == ["x-anthropic-billing-header"]
    assert read_system([label], []) == []
    assert read_system("Be brief.", []) == [{"role": "system", "content": "Be brief."}]
    assert read_system("", []) == []


def test_fields_that_the_sdk_sends_back_are_accepted() -> None:
    no_effect: list[str] = []
    blocks = [{**TEXT, "citations": None, "parsed_output": None}, {**tool_use(), "caller": {"type": "direct"}}]
    read_messages([user(TEXT), assistant(*blocks)], no_effect)
    assert no_effect == []
    read_messages([assistant({**TEXT, "citations": [{}]})], no_effect)
    assert no_effect == ["citations"]


CONTENT_REFUSED: dict[str, tuple[Any, str]] = {
    "none": ([], "messages"),
    "not an array": ("Hello", "messages"),
    "a string inside": ([user(TEXT), "Hello"], "messages[1]"),
    "unknown role": ([{"role": "tool", "content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "unknown key": ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
    "a block that is a string": ([user("x")], "messages[0].content[0]"),
    "a block without type": ([user({"text": "x"})], "messages[0].content[0].type"),
    "a block whose type is no string": ([user({"type": ["text"]})], "messages[0].content[0].type"),
    "an image without source": ([user({"type": "image", "source": {}})], "messages[0].content[0].source"),
    "an image of another type": (
        [user({"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}})],
        "messages[0].content[0].source.media_type",
    ),
    "an image of the assistant": ([assistant({"type": "image"})], "messages[0].content[0].type"),
    "a document": ([user({"type": "document", "source": {}})], "messages[0].content[0].type"),
    "an image in a result": ([user(tool_result([{"type": "image"}]))], "messages[0].content[0].content[0].source"),
    "a result in a result": ([user(tool_result([tool_result()]))], "messages[0].content[0].content[0].type"),
    "a tool use of the user": ([user(tool_use())], "messages[0].content[0].type"),
    "a result of the assistant": ([assistant(tool_result())], "messages[0].content[0].type"),
    "thinking of the user": ([user({"type": "thinking", "thinking": "x"})], "messages[0].content[0].type"),
    "a tool in the system": ([{"role": "system", "content": [tool_use()]}], "messages[0].content[0].type"),
    "text of another type": ([user({"type": "text", "text": 1})], "messages[0].content[0].text"),
    "unknown key of a block": ([user({**TEXT, "color": "red"})], "messages[0].content[0].color"),
    "unknown cache control": (
        [user({**TEXT, "cache_control": {"type": "forever"}})],
        "messages[0].content[0].cache_control.type",
    ),
    "thinking of another type": ([assistant({"type": "thinking", "thinking": 1})], "messages[0].content[0].thinking"),
    "a signature of another type": (
        [assistant({"type": "thinking", "thinking": "x", "signature": 1})],
        "messages[0].content[0].signature",
    ),
    "a damaged signature": (
        [assistant({"type": "thinking", "thinking": "", "signature": "base64-*"})],
        "messages[0].content[0].signature",
    ),
    "no id": ([assistant({**tool_use(), "id": ""})], "messages[0].content[0].id"),
    "no name": ([assistant({**tool_use(), "name": None})], "messages[0].content[0].name"),
    "an input of another type": ([assistant({**tool_use(), "input": "{}"})], "messages[0].content[0].input"),
    "another caller": ([assistant({**tool_use(), "caller": {"type": "x"}})], "messages[0].content[0].caller"),
    "no id of the result": ([user(tool_result(id_=""))], "messages[0].content[0].tool_use_id"),
    "is_error of another type": ([user(tool_result(is_error=1))], "messages[0].content[0].is_error"),
}


@pytest.mark.parametrize(("messages", "param"), CONTENT_REFUSED.values(), ids=CONTENT_REFUSED)
def test_messages_that_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages(messages, [])
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("ephemeral", "cache_control"),
        ({"type": "ephemeral", "ttl": "1d"}, "cache_control.ttl"),
        ({"type": "ephemeral", "scope": 1}, "cache_control.scope"),
        ({"type": "ephemeral", "size": 1}, "cache_control.size"),
    ],
)
def test_cache_markers_that_are_refused(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_cache_control("cache_control", value)
    assert caught.value.param == param


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "role", "id", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
blocks = st.sampled_from([TEXT, tool_use(), tool_result(), {"type": "thinking", "thinking": "x"}, {"type": "image"}])
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "x"]),
        "content": st.lists(blocks | values, max_size=4) | values,
    }
)


@given(st.lists(messages | values, max_size=4) | values)
def test_any_messages_are_accepted_or_refused_by_name(value: Any) -> None:
    for read in (read_messages, read_system):
        refusal: ApiError | None = None
        found: list[Any] = []
        try:
            found = read(value, [])
        except ApiError as error:
            refusal = error
        assert refusal is None or refusal.param is not None
        assert all(message["role"] in ("system", "user", "assistant", "tool") for message in found)


# --- The parameters of the Messages API, one by one -------------------------------------------------------------------


def read_parameters(name: str, value: Any) -> Any:
    return CREATE[name].read(name, value)


ACCEPTED: dict[str, tuple[str, Any, Any]] = {
    "thinking on": (
        "thinking",
        {"type": "enabled", "budget_tokens": 1024},
        {"enabled": True, "budget_tokens": 1024, "is_hidden": False},
    ),
    "thinking on without a budget": (
        "thinking",
        {"type": "enabled", "display": "omitted"},
        {"enabled": True, "budget_tokens": None, "is_hidden": True},
    ),
    "adaptive thinking with the budget that an agent sends": (
        "thinking",
        {"type": "adaptive", "budget_tokens": 0, "display": "summarized"},
        {"enabled": True, "budget_tokens": None, "is_hidden": False},
    ),
    "thinking off": ("thinking", {"type": "disabled"}, {"enabled": False, "budget_tokens": None, "is_hidden": False}),
    "effort": ("output_config", {"effort": "low", "format": None}, {"effort": "low"}),
    "user": ("metadata", {"user_id": "user_1"}, "user_1"),
    "no user": ("metadata", {"user_id": None}, ""),
    "no edits": ("context_management", {"edits": []}, ALL),
    "clear no thinking": ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, ALL),
    "clear thinking": ("context_management", {"edits": [{"type": "clear_thinking_20251015"}]}, 1),
    "clear thinking but two": (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}]},
        2,
    ),
    "no tokens": ("max_tokens", 0, 0),
    "cache control": ("cache_control", {"type": "ephemeral"}, True),
}


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted(name: str, value: Any, expected: Any) -> None:
    assert read_parameters(name, value) == expected


REFUSALS: dict[str, tuple[str, Any, str]] = {
    "thinking of another type": ("thinking", True, "thinking"),
    "unknown thinking": ("thinking", {"type": "between_tools"}, "thinking.type"),
    "a budget of 0": ("thinking", {"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
    "a budget without thinking": ("thinking", {"type": "disabled", "budget_tokens": 5}, "thinking.budget_tokens"),
    "unknown display": ("thinking", {"type": "enabled", "display": "all"}, "thinking.display"),
    "unknown key of thinking": ("thinking", {"type": "enabled", "depth": 1}, "thinking.depth"),
    "unknown effort": ("output_config", {"effort": "extreme"}, "output_config.effort"),
    "unknown key of output": ("output_config", {"style": "x"}, "output_config.style"),
    "unknown format": ("output_config", {"format": {"type": "xml"}}, "output_config.format.type"),
    "no schema": ("output_config", {"format": {"type": "json_schema"}}, "output_config.format.schema"),
    "no schema of the old name": ("output_format", {"type": "json_schema"}, "output_format.schema"),
    "unknown metadata": ("metadata", {"tag": "x"}, "metadata.tag"),
    "a user that is too long": ("metadata", {"user_id": "x" * 513}, "metadata.user_id"),
    "another edit": (
        "context_management",
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "context_management.edits[0].type",
    ),
    "keep nothing": (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]},
        "context_management.edits[0].keep.value",
    ),
    "keep something else": (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]},
        "context_management.edits[0].keep",
    ),
    "negative tokens": ("max_tokens", -1, "max_tokens"),
    "a temperature over 1": ("temperature", 1.5, "temperature"),
    "a stop sequence that is a string": ("stop_sequences", "x", "stop_sequences"),
    "an empty stop sequence": ("stop_sequences", [""], "stop_sequences"),
    "a tier of OpenAI": ("service_tier", "flex", "service_tier"),
}


@pytest.mark.parametrize(("name", "value", "param"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused(name: str, value: Any, param: str) -> None:
    with pytest.raises((ApiError, InvalidValue)) as caught:
        read_parameters(name, value)
    refusal = caught.value
    assert (refusal.name if isinstance(refusal, InvalidValue) else refusal.param) == param  # type: ignore[attr-defined]


# --- The schemas of tools that clients run themselves -----------------------------------------------------------------


NAMES = {
    "bash_20241022": "bash",
    "bash_20250124": "bash",
    "text_editor_20241022": "str_replace_editor",
    "text_editor_20250124": "str_replace_editor",
    "text_editor_20250429": "str_replace_based_edit_tool",
    "text_editor_20250728": "str_replace_based_edit_tool",
    "memory_20250818": "memory",
}


@pytest.mark.parametrize(("kind", "name"), NAMES.items())
def test_a_client_tool_has_a_name_and_a_correct_schema(kind: str, name: str) -> None:
    tool = client_tool(kind)
    assert tool is not None
    assert tool.name == name
    jsonschema.Draft202012Validator.check_schema(tool.input_schema)
    assert all(field in tool.input_schema["properties"] for field in tool.input_schema["required"])


@pytest.mark.parametrize(
    "kind",
    ["web_search_20250305", "code_execution_20250825", "computer_20250124", "bash", "bash_2025", "x" * 10_000, ""],
)
def test_other_tools_are_none(kind: str) -> None:
    assert client_tool(kind) is None


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("bash_20250124", {"command": "ls"}),
        ("bash_20250124", {"restart": True}),
        ("text_editor_20250124", {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "x"}),
        ("text_editor_20250124", {"command": "undo_edit", "path": "/a"}),
        ("text_editor_20250728", {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"}),
        ("text_editor_20250728", {"command": "view", "path": "/a", "view_range": [1, -1]}),
        ("memory_20250818", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
    ],
)
def test_a_schema_takes_what_the_documentation_shows(kind: str, arguments: dict[str, object]) -> None:
    tool = client_tool(kind)
    assert tool is not None
    jsonschema.validate(arguments, tool.input_schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**arguments, "command": 5}, tool.input_schema)
