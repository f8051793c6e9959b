"""Requests of the Responses API: parameters, items and tools."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.responses.compaction import Compaction
from quire.gateway.api.responses.items import (
    MAX_ITEMS,
    droppable,
    messages_of,
    read_items,
    shown_to_model,
    without_oldest,
)
from quire.gateway.api.responses.parameters import REFUSED, RESPONSES
from quire.gateway.api.responses.request import read_request
from quire.gateway.api.responses.tools import (
    FunctionName,
    GivenTools,
    function_names,
    read_response_tool_choice,
    read_response_tools,
)
from quire.gateway.errors.api_errors import ApiError, InvalidRequest
from quire.gateway.output.tools import ToolMode
from quire.shared.config.validators import InvalidValue
from tests.gateway.api.test_conversation import answering
from tests.support.gateway.response_calls import TOOL, create, prompt
from tests.support.gateway.running import MODEL, RunningGateway

# --- Bodies that were read: warnings, options, the fields that the answer repeats -------------------------------------


# Words that give a random body the shape of a real one.
KEYS = "type role content text name id status call_id output arguments format tools mode summary schema effort"
TYPES = (
    "function message reasoning function_call function_call_output item_reference json_schema allowed_tools input_text"
)
WORDS = st.sampled_from((*RESPONSES, *KEYS.split(), *TYPES.split(), "user", "assistant", "auto", "required", "{}"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


async def test_labels_choose_the_class(gateway: RunningGateway) -> None:
    for more, priority_class in [({"service_tier": "flex"}, "batch"), ({"priority": "interactive"}, "interactive")]:
        reply = await create(gateway, background=True, **more)
        keys, redis = gateway.gateway.broker.keys, gateway.gateway.broker.client
        assert await redis.hget(keys.request(reply.json["id"][5:]), "class") == priority_class.encode()
        assert reply.json["service_tier"] == more.get("service_tier", "default")


async def test_allowed_tools_are_those_that_the_model_is_told_about(gateway: RunningGateway) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    async with gateway.worker(answering("x")) as worker:
        reply = await create(gateway, tools=[{**TOOL, "name": "other"}, TOOL], tool_choice=allowed)
    told = prompt(worker.claimed[0])
    assert '"name": "weather"' in told
    assert "other" not in told
    assert reply.json["tool_choice"] == allowed
    assert len(reply.json["tools"]) == 2


async def test_fields_that_are_too_long_to_be_repeated_are_refused(gateway: RunningGateway) -> None:
    reply = await create(
        gateway, tools=[{**TOOL, "description": "\n" * 65_000, "name": f"t{index}"} for index in range(9)]
    )
    assert (reply.status, reply.error["param"]) == (400, "tools")


LIMITS = RequestLimits(
    model=MODEL,
    max_model_len=512,
    max_num_seqs=8,
    vocab_size=500,
    max_n=4,
    max_prompts=4,
    max_choices=8,
    max_tools=8,
    max_schema_bytes=1000,
    max_schema_depth=8,
    special_tokens={},
    sampling_defaults={},
)


@settings(max_examples=200, deadline=None)
@given(body=st.dictionaries(st.sampled_from(tuple(RESPONSES)), VALUES, max_size=6))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    refusal = ApiError("none", param="none")
    try:
        request = read_request({"model": MODEL, "input": "x", **body}, LIMITS)
        request.echo()
        request.conversation([item for item in request.items if item["type"] != "item_reference"])
    except InvalidRequest as error:
        refusal = error
    assert refusal.param


# --- Parameters of POST /v1/responses, refused with their names -------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
WRONG: list[tuple[str, Any, str]] = [
    ("model", "other", "model"),
    ("model", None, "model"),
    ("input", 5, "input"),
    ("input", None, "input"),
    ("instructions", 5, "instructions"),
    ("previous_response_id", "", "previous_response_id"),
    ("previous_response_id", 5, "previous_response_id"),
    ("max_output_tokens", 0, "max_output_tokens"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "name": "f"}, "tool_choice"),
    (
        "tool_choice",
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "tool_choice.tools",
    ),
    ("parallel_tool_calls", 1, "parallel_tool_calls"),
    ("text", {"format": {"type": "xml"}}, "text.format.type"),
    ("text", {"format": {"type": "json_schema", "schema": SCHEMA}}, "text.format.name"),
    ("text", {"format": {"type": "json_schema", "name": "a", "schema": 5}}, "text.format.schema"),
    ("text", {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}, "text.format.schema"),
    ("text", {"format": {"type": "json_schema", "json_schema": {}}}, "text.format.json_schema"),
    ("text", {"verbosity": "loud"}, "text.verbosity"),
    ("text", {"other": 1}, "text.other"),
    ("reasoning", {"effort": "huge"}, "reasoning.effort"),
    ("reasoning", {"summary": "long"}, "reasoning.summary"),
    ("reasoning", {"mode": "pro"}, "reasoning.mode"),
    ("include", ["everything"], "include[0]"),
    ("include", "x", "include"),
    ("top_logprobs", 21, "top_logprobs"),
    ("truncation", "middle", "truncation"),
    ("store", "yes", "store"),
    ("stream", "yes", "stream"),
    ("stream_options", {}, "stream_options"),
    ("max_tool_calls", -1, "max_tool_calls"),
    ("metadata", {"a": 5}, "metadata.a"),
    ("service_tier", "scale", "service_tier"),
    ("user", 5, "user"),
    ("temperature", 3, "temperature"),
    ("n", 2, "n"),
    ("messages", [], "messages"),
    ("max_tokens", 5, "max_tokens"),
    ("response_format", {"type": "text"}, "response_format"),
    ("nonsense", 1, "nonsense"),
]


async def test_a_wrong_value_is_refused_with_its_name(gateway: RunningGateway) -> None:
    for name, value, param in WRONG:
        reply = await create(gateway, **{name: value})
        assert reply.status == (404 if (name, value) == ("model", "other") else 400)
        assert reply.error["param"] == param
        assert param in reply.error["message"]
        assert await gateway.accepted() == 0


async def test_what_this_server_lacks_is_refused_by_name(gateway: RunningGateway) -> None:
    for name in REFUSED:
        reply = await create(gateway, **{name: {"id": "x"}})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_parameter")


async def test_background_needs_store(gateway: RunningGateway) -> None:
    reply = await create(gateway, background=True, store=False)
    assert (reply.status, reply.error["param"]) == (400, "store")


async def test_obfuscation_is_refused(gateway: RunningGateway) -> None:
    reply = await create(gateway, stream=True, stream_options={"include_obfuscation": True})
    assert (reply.status, reply.error["param"]) == (400, "stream_options.include_obfuscation")


# --- Input items: their form, their refusals, and the messages that they become ---------------------------------------


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def messages(*items: Any, instructions: str = "") -> list[Any]:
    return list(messages_of(instructions, read_items("input", list(items))))


def test_a_string_is_one_message() -> None:
    [item] = read_items("input", "Hello")
    assert item["id"].startswith("msg_")
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "Hello"}])
    assert read_items("input", "") == []


def test_items_keep_their_ids_and_get_the_form_of_answers() -> None:
    given: list[dict[str, Any]] = [
        {"type": "message", "id": "msg_1", "role": "assistant", "content": "A", "phase": "commentary"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {**CALL, "id": "fc_1", "status": "completed"},
        {**OUTPUT, "output": [{"type": "input_text", "text": "2"}]},
    ]
    message, reasoning, call, output = read_items("input", given)
    part = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
    assert message == {**given[0], "status": "completed", "content": [part]}
    assert reasoning == {**given[1], "status": "completed"}
    assert call == given[2]
    assert output["id"].startswith("fco_")
    # Read again, as a client sends back what it listed.
    assert read_items("input", [message, reasoning, call, output]) == [message, reasoning, call, output]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[0]"),
        ({"type": "web_search", "id": "ws_1"}, "input[0].type"),
        ({"type": 5}, "input[0].type"),
        ({}, "input[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url"),
        (
            {"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": "x"}]},
            "input[0].content[0].file_id",
        ),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x", "extra": 1}]}, "input[0].content[0].extra"),
        ({"role": "user", "content": "x", "extra": 1}, "input[0].extra"),
        ({"role": "user", "content": "x", "status": "new"}, "input[0].status"),
        ({"role": "user", "content": "x", "id": ""}, "input[0].id"),
        ({**CALL, "arguments": {}}, "input[0].arguments"),
        ({**CALL, "call_id": None}, "input[0].call_id"),
        ({**CALL, "name": "a b"}, "input[0].name"),
        ({**CALL, "namespace": "a b"}, "input[0].namespace"),
        ({**CALL, "caller": "direct"}, "input[0].caller"),
        ({**OUTPUT, "output": 5}, "input[0].output"),
        ({"type": "reasoning", "content": "x"}, "input[0].content"),
        ({"type": "reasoning", "summary": [{"type": "other", "text": "x"}]}, "input[0].summary[0]"),
        ({"type": "item_reference"}, "input[0].id"),
        ({"type": "compaction_trigger"}, "input[0].type"),
        ({"type": "additional_tools", "role": "user", "tools": []}, "input[0].role"),
        ({"type": "additional_tools", "role": "developer"}, "input[0].tools"),
        ({"type": "additional_tools", "role": "developer", "tools": [{"type": "function"}]}, "input[0].tools[0].name"),
    ],
)
def test_a_wrong_item_is_refused_with_its_place(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_items("input", [item])
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "kind",
    [
        "custom_tool_call",
        "custom_tool_call_output",
        "web_search_call",
        "new_call",
        "agent_message",
        "context_compaction",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
    ],
)
def test_items_that_only_other_servers_have_are_left_out(kind: str) -> None:
    skipped: list[tuple[str, str]] = []
    foreign = {"type": kind, "id": "x", "anything": {"a": 1}}
    [item] = read_items("input", [foreign, user("Hi")], skipped)
    assert item["role"] == "user"
    [(name, reason)] = skipped
    assert name == "input[0]"
    assert kind in reason


def test_too_many_items_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="10000"):
        read_items("input", [user("x")] * 10_001)


def test_the_items_of_one_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]}
    text = {"role": "assistant", "content": "Let me see."}
    found = messages(user("a"), reasoning, text, CALL, {**CALL, "call_id": "d"}, OUTPUT, {**OUTPUT, "call_id": "d"})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "why",
            "tool_calls": [call, {**call, "id": "d"}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "tool_call_id": "d"},
    ]
    assert messages(reasoning, CALL)[0] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "why",
        "tool_calls": [call],
    }


def test_reasoning_that_only_another_server_can_read_adds_nothing() -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert messages(user("a"), hidden, CALL)[1]["content"] is None
    assert "reasoning_content" not in messages(user("a"), hidden, CALL)[1]


def test_messages_of_the_system_at_the_beginning_become_one() -> None:
    developer = {"role": "developer", "content": "dev"}
    system = {"role": "system", "content": [{"type": "input_text", "text": "sys"}]}
    assert messages(developer, system, user("a"), developer, instructions="Be.") == [
        {"role": "system", "content": "Be.\n\ndev\n\nsys"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "dev"},
    ]


@pytest.mark.parametrize("instructions", ["", "Be."])
def test_without_a_message_the_user_says_nothing(instructions: str) -> None:
    assert messages(instructions=instructions)[-1] == {"role": "user", "content": ""}


def test_an_output_without_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="call_id") as caught:
        messages(user("a"), OUTPUT)
    assert caught.value.param == "input"


@pytest.mark.parametrize("status", ["completed", "incomplete", None])
@pytest.mark.parametrize("arguments", ['{"a": ', "[]", "not json"])
def test_a_function_call_without_whole_arguments_is_kept_with_its_output(status: str | None, arguments: str) -> None:
    """LangChain sends back the call in which an answer ended, without its status."""
    cut = {**CALL, "arguments": arguments, "status": status}
    _, asked, result = messages(user("x"), cut, {**OUTPUT, "output": "not run"})
    assert asked["tool_calls"][0]["function"] == {"name": "f", "arguments": {"INVALID_JSON": arguments}}
    assert result == {"role": "tool", "content": "not run", "tool_call_id": "c"}


def test_additional_tools_are_no_message() -> None:
    tools = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    assert messages(tools, {"role": "developer", "content": "d"}, user("x"), instructions="i") == [
        {"role": "system", "content": "i\n\nd"},
        user("x"),
    ]
    [item] = read_items("input", [tools])
    assert item["id"].startswith("at_")
    assert read_items("input", [item]) == [item]


@pytest.mark.parametrize("kind", ["compaction", "additional_tools"])
def test_the_time_of_an_input_grows_with_its_length(kind: str) -> None:
    """The event loop waits for it. With each item looking at those before it, these took 3 and 30 seconds."""
    half = MAX_ITEMS // 2
    content = Compaction("so far", [{"type": "message", "role": "user", "content": "Hello"}]).encode()
    item = {
        "compaction": {"type": kind, "encrypted_content": content},
        "additional_tools": {"type": kind, "role": "developer", "tools": [TOOL, *[{"type": "x"}] * 40]},
    }[kind]
    body = {"model": MODEL, "input": [{"role": "developer", "content": "x"}] * half + [item] * half}
    since = time.process_time()
    request = read_request(body, LIMITS)
    shown = shown_to_model(request.items)
    assert time.process_time() - since < 2.5
    if kind == "compaction":
        assert [item["role"] for item in shown] == ["developer"] * half + ["user"] * 2
    else:
        assert (len(request.tools.functions), len(request.skipped)) == (1, 40 * half)


def test_the_oldest_items_are_dropped_with_the_outputs_of_dropped_calls() -> None:
    items = read_items("input", [{"role": "system", "content": "s"}, user("a"), CALL, OUTPUT, user("b"), user("c")])
    assert droppable(items) == 4
    left = [
        [item.get("call_id", item.get("content")) for item in without_oldest(items, count)][1:] for count in range(5)
    ]
    a, b, c = [items[index]["content"] for index in (1, 4, 5)]
    assert left == [[a, "c", "c", b, c], ["c", "c", b, c], [b, c], [b, c], [c]]
    assert droppable([]) == 0


# --- Tools of responses: functions, skipped types, choices ------------------------------------------------------------


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def test_functions_are_kept_and_other_types_are_skipped() -> None:
    given = [
        {"type": "web_search", "search_context_size": "low"},
        FUNCTION,
        {"type": "mcp", "server_label": "x"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "g", "defer_loading": True},
    ]
    tools = read_response_tools("tools", given)
    assert [(tool.name, tool.strict) for tool in tools.tools] == [("f", True), ("g", False)]
    assert tools.echo()[0] == {**FUNCTION, "description": None}
    assert [name for name, _ in tools.skipped] == ["tools[0]", "tools[2]", "tools[3]", "tools[4].defer_loading"]
    assert "web_search" in tools.skipped[0][1]


def space(name: str, *functions: str, **more: Any) -> dict[str, Any]:
    inner = [{"type": "function", "name": function, "description": f"Does {function}."} for function in functions]
    return {"type": "namespace", "name": name, "description": f"About {name}.", "tools": inner, **more}


def test_the_functions_of_a_namespace_have_flat_names_for_the_model() -> None:
    given = [space("n", "f", "g"), {"type": "function", "name": "f"}, {"type": "web_search"}]
    given[0]["tools"].append({"type": "custom", "name": "h"})
    tools = read_response_tools("tools", given)
    assert [(one.name, one.description) for one in tools.tools] == [
        ("n__f", "About n.\n\nDoes f."),
        ("n__g", "Does g."),
        ("f", ""),
    ]
    assert [one.place for one in tools.functions] == ["tools[0].tools[0]", "tools[0].tools[1]", "tools[1]"]
    assert [name for name, _ in tools.skipped] == ["tools[0].tools[2]", "tools[2]"]
    function, namespace = tools.echo()
    assert (function["name"], namespace["name"], namespace["description"]) == ("f", "n", "About n.")
    assert [one["name"] for one in namespace["tools"]] == ["f", "g"]
    names = function_names(json.dumps({"tools": tools.echo()}, separators=(",", ":")))
    assert names == {"n__f": FunctionName("n", "f"), "n__g": FunctionName("n", "g")}
    assert function_names(json.dumps({"tools": [function]})) == {}


def test_later_tools_replace_those_of_the_same_name() -> None:
    first = read_response_tools("tools", [space("n", "f"), FUNCTION])
    changed = {"type": "function", "name": "f", "description": "new"}
    later = read_response_tools("input[0].tools", [space("n", "g"), changed, {"type": "mcp"}])
    both = GivenTools.merged([first, later])
    assert [(one.tool.name, one.place) for one in both.functions] == [
        ("n__f", "tools[0].tools[0]"),
        ("n__g", "input[0].tools[0].tools[0]"),
        ("f", "input[0].tools[1]"),
    ]
    assert [one["name"] for one in both.echo()[-1]["tools"]] == ["f", "g"]
    assert [name for name, _ in both.skipped] == ["input[0].tools[2]"]
    assert GivenTools.merged([first]) == first
    with pytest.raises(InvalidRequest, match="another tool"):
        GivenTools.merged([first, read_response_tools("input[0].tools", [{"type": "function", "name": "n__f"}])])


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([5], "tools[0]"),
        ([{"name": "f"}], "tools[0]"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "function": {"name": "f"}}], "tools[0].function"),
        ([{**FUNCTION, "parameters": {"type": "array"}}], "tools[0].parameters.type"),
        ([{**FUNCTION, "strict": 1}], "tools[0].strict"),
        ([FUNCTION, FUNCTION], "tools[1].name"),
        ([FUNCTION] * 1025, "tools"),
        ([{"type": "web_search"}] * 1025, "tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}] * 1024}], "tools"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [], "x": 1}], "tools[0].x"),
        ([{"type": "namespace", "name": "n", "description": 1, "tools": []}], "tools[0].description"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": []}] * 2, "tools[1].name"),
        # The model could not tell these apart.
        ([space("a", "b__f"), space("a__b", "f")], "tools[1].tools[0].name"),
        ([space("n", "f"), {"type": "function", "name": "n__f"}], "tools[1].name"),
    ],
)
def test_wrong_tools_are_refused(tools: Any, param: str) -> None:
    with pytest.raises((InvalidRequest, InvalidValue)) as caught:
        read_response_tools("tools", tools)
    assert getattr(caught.value, "param", None) == param or getattr(caught.value, "name", None) == param


def test_choices() -> None:
    assert read_response_tool_choice("tool_choice", "required").choice.mode == ToolMode.REQUIRED
    named = read_response_tool_choice("tool_choice", {"type": "function", "name": "f"})
    assert (named.choice.mode, named.choice.name) == (ToolMode.NAMED, "f")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    found = read_response_tool_choice("tool_choice", {**allowed, "tools": [*allowed["tools"], {"type": "mcp"}]})
    assert (found.choice.mode, found.allowed, found.echo) == (ToolMode.REQUIRED, (FunctionName("", "f"),), allowed)


def test_choices_of_functions_within_namespaces() -> None:
    choice = {"type": "function", "namespace": "n", "name": "f"}
    named = read_response_tool_choice("tool_choice", choice)
    assert (named.choice.name, named.echo) == ("n__f", choice)
    tools = [{"type": "namespace", "name": "m"}, choice]
    allowed = read_response_tool_choice("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": tools})
    assert allowed.echo["tools"] == tools
    names = [("n", "f"), ("n", "g"), ("m", "x"), ("", "f")]
    assert [allowed.allows(FunctionName(*name)) for name in names] == [True, False, True, False]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (5, "tool_choice"),
        ("named", "tool_choice"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "function": {"name": "f"}}, "tool_choice.function"),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
    ],
)
def test_wrong_choices_are_refused(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_response_tool_choice("tool_choice", choice)
    assert caught.value.param == param
